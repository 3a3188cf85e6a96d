"""The built-in rollout engine: batched generation with any Hugging Face causal language model.

``scheduler`` decides what runs, ``runner`` holds the running batch, ``kv_cache`` and ``attention`` serve the model's
forward, ``weights`` holds the module and ``packed_linears`` the copies of its matrices that CPUs multiply with;
``engine`` is the public face.
"""
