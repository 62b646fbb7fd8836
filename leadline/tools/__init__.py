"""Programs of the workshop: ``python -m leadline.tools.<name>``."""
