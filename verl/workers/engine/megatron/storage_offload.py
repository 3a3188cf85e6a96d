"""Offload storages in place, so that existing views stay valid.

Megatron-core keeps parameters, gradients and optimizer shards as views of a few large buffers. Replacing the tensors
would cut these ties; emptying and refilling their storages keeps every view valid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor


class StorageOffloader:
    """Storages that can leave their device for a while.

    Args:
        tensors: gives the tensors whose storages move; those that share one move together.
        keep: False forgets the contents: they come back as zeros and take no host memory.
    """

    def __init__(self, tensors: Callable[[], Iterable[Tensor]], *, keep: bool = True) -> None:
        self._tensors = tensors
        self._keep = keep
        self._away: list[tuple[torch.UntypedStorage, int, torch.UntypedStorage | None]] = []

    def offload(self) -> None:
        """Free the device memory; a second call changes nothing."""
        if self._away:
            return
        storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in self._tensors()}
        for storage in storages.values():
            if storage.nbytes() == 0:
                continue
            copy = None
            if self._keep:
                copy = torch.UntypedStorage(storage.nbytes(), device="cpu")
                if storage.device.type == "cuda":
                    copy = copy.pin_memory()
                copy.copy_(storage)
            self._away.append((storage, storage.nbytes(), copy))
            storage.resize_(0)

    def reload(self) -> None:
        """Allocate the memory again and restore the contents."""
        for storage, size, copy in self._away:
            storage.resize_(size)
            if copy is None:
                torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).zero_()
            else:
                storage.copy_(copy)
        self._away.clear()
