"""Well-known path of :class:`verl.data.sft_dataset.MultiTurnSFTDataset`."""

from verl.data.sft_dataset import MultiTurnSFTDataset

__all__ = ["MultiTurnSFTDataset"]
