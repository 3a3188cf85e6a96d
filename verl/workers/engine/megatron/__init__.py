"""Training with Megatron-core: the engine, the models it builds, and the way to Hugging Face weights and back.

Only ``engine``, ``families`` and the pure tables (``tensor_layouts``, ``weights``, ``slices``) load without
Megatron-core.
"""
