"""The HTTP server: talks to clients, and to an engine only through ``core.client``."""
