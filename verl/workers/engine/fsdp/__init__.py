"""Training with PyTorch FSDP2: the engine, how a model is sharded, and its checkpoints."""
