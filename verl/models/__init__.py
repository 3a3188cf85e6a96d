"""Models: loading from Hugging Face directories, heads, packing without padding, attention and token log-probs."""
