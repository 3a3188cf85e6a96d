"""Well-known paths of the data sets; the code lives in :mod:`verl.data`."""

from verl.data.rl_dataset import RLHFDataset, collate_fn
from verl.data.sft_dataset import MultiTurnSFTDataset, SFTDataset

__all__ = ["MultiTurnSFTDataset", "RLHFDataset", "SFTDataset", "collate_fn"]
