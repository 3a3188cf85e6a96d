"""Training engines, rollout engines, and the worker roles that join them."""
