"""What ``LLM`` and ``AsyncLLM`` share: settings and prompts in, results out. No torch."""
