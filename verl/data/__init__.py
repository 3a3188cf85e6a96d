"""Prompts and demonstrations: files to rows, rows to tensors, tensors to batches, resumable to the sample."""

from verl.data.collate import collate_fn
from verl.data.loader import ResumableDataLoader, create_dataloader
from verl.data.rl_dataset import RLHFDataset, create_dataset, fingerprint_of, get_dataset_class, has_images

__all__ = [
    "RLHFDataset",
    "ResumableDataLoader",
    "collate_fn",
    "create_dataloader",
    "create_dataset",
    "fingerprint_of",
    "get_dataset_class",
    "has_images",
]
