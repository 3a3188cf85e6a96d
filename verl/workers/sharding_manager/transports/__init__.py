"""The ways that weights take from the trainer to the rollout: same process, shared memory, broadcast, disk."""
