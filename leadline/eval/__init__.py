"""What a model can do, and what a lossy switch costs it."""
