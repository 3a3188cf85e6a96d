"""Well-known path of :mod:`verl.data.rl_dataset`."""

from verl.data.rl_dataset import RLHFDataset, collate_fn

__all__ = ["RLHFDataset", "collate_fn"]
