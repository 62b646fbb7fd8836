"""DeepSeek-V4.1: a causal encoder-decoder with one global cache for its upper half."""
