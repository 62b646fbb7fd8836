"""Mathematics that V4 and V4.1 share without an ``if``."""
