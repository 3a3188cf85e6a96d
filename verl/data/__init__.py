"""Prompts and demonstrations: files to rows, rows to tensors, tensors to batches, resumable to the sample."""
