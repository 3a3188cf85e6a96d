"""Generation with vLLM in the process of a worker."""
