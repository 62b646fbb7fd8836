"""How fast a model runs in this process: no HTTP, no files but the model's."""
