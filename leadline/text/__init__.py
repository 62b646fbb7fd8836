"""Text on both sides of the model: requests to prompt ids, output ids to text and deltas."""
