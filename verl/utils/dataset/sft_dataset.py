"""Well-known path of :mod:`verl.data.sft_dataset`."""

from verl.data.sft_dataset import SFTDataset

__all__ = ["SFTDataset"]
