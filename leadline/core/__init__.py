"""Plain values that every part shares. Imports nothing of Leadline and no torch."""
