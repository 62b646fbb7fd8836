"""The Responses dialect (serving-api 7)."""
