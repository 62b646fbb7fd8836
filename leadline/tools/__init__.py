"""Programs run by hand: ``python -m leadline.tools.NAME``."""
