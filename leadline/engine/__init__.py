"""The engine: who runs next, one step after another, and the process it happens in."""
