"""Physical memory of CPU tensors, given back while the tensors stay."""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys

import torch


def forget_pages(storage: torch.UntypedStorage) -> bool:
    """Give the physical memory of a CPU storage back to the system; whether that was possible.

    The addresses stay valid, which an engine's cache tensors need, and read as zeros, as after allocation; touched
    pages get memory again.
    """
    if not sys.platform.startswith("linux") or storage.device.type != "cpu":
        return False
    page = mmap.PAGESIZE
    start = -(-storage.data_ptr() // page) * page
    length = (storage.data_ptr() + storage.nbytes()) // page * page - start
    return length <= 0 or _libc().madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), mmap.MADV_DONTNEED) == 0


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
