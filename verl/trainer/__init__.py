"""Training loops and their entry points."""
