"""DeepSeek-V4: every layer has a compressed cache of its own, and sees every token."""
