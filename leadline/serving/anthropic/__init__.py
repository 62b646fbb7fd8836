"""The Messages dialect (serving-api 8)."""
