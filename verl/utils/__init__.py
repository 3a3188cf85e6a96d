"""Leaf helpers. Nothing here knows about algorithms, models or workers."""
