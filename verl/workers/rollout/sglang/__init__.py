"""Generation with an SGLang server that a worker starts as its child process."""
