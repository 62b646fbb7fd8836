"""Checkpoints in the official layout: names, formats, and strict loading by byte range."""
