"""Rollout servers: an engine in its own process, replicas of it, their client, the OpenAI-compatible endpoint."""
