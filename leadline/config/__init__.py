"""What runs and how, frozen at start: model shapes and settings. No torch."""
