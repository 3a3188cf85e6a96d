"""Run a program that nobody has vetted: within limits, without a network, with one folder of its own."""
