"""Transports on one machine: the very same tensors within a process, shared memory between processes."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import pickle
import tempfile
import weakref
from collections.abc import Callable, Generator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from verl.errors import WeightSyncError
from verl.utils import plain_pickle
from verl.utils.fs import format_bytes
from verl.utils.owned import owned_name
from verl.workers.sharding_manager.transports.base import (
    Bucket,
    Delivery,
    Message,
    Transport,
    Unpacker,
    Weights,
    in_buckets,
    messages,
    require_newer,
)

#: what a message of the store may refer to besides numbers and text: torch's description of a tensor's memory
_OF_CUDA_HANDLES = frozenset(
    {"torch.Size", "torch._tensor.Tensor", "torch.Tensor", "torch.storage.TypedStorage", "torch.storage.UntypedStorage"}
)


class ColocatedTransport(Transport):
    """Both sides in one process: tensors are passed on as they are and nothing is copied.

    ``send`` only remembers what to send; tensors are drawn while the receiver takes them. Live tensors come in one
    bucket, since they need no memory; others are drawn a bucket at a time.

    Args:
        bucket_bytes: size of a bucket of tensors that are not live.
    """

    def __init__(self, bucket_bytes: int = 512 << 20) -> None:
        self.bucket_bytes = bucket_bytes
        self._version = -1
        self._waiting: Delivery | None = None

    def send(self, version: int, weights: Weights, *, live: bool = False) -> int:
        """See :meth:`Transport.send`; moves nothing."""
        require_newer(version, self._version)
        self._version = version
        buckets = _all_at_once(weights) if live else in_buckets(weights, self.bucket_bytes)
        self._waiting = Delivery(version, live, buckets)
        return 0

    def receive(self, *, newer_than: int = -1) -> Delivery:
        """See :meth:`Transport.receive`; in one process there is nothing to wait for."""
        delivery, self._waiting = self._waiting, None
        if delivery is None:
            raise WeightSyncError("no weights were sent; within one process send() comes before receive()")
        require_newer(delivery.version, newer_than)
        return delivery


def _all_at_once(weights: Weights) -> Generator[Bucket, None, None]:
    bucket = list(weights)
    if bucket:
        yield bucket


class SharedMemoryTransport(Transport):
    """Processes of one machine: the sender fills slots of shared memory that the receivers read in place.

    On CPU a slot is a file in memory that all map; on CUDA it is device memory that receivers open through CUDA IPC, so
    that nothing leaves the GPU. A slot is filled again when every receiver is done with it, so the cost is ``slots``
    buckets, whatever the number of receivers. Messages go through a store.

    Args:
        store: that both sides reach, such as ``torch.distributed.FileStore`` in a common directory or a ``TCPStore``.
        receivers: how many there are.
        receiver: which of them this is; None is the sender.
        bucket_bytes: size of a slot; only the sender's counts.
        slots: buckets in flight; with 2 the sender fills one while the receivers read the other.
        device: where the sender's slots are.
        timeout_s: how long one side waits for the other.
    """

    def __init__(
        self,
        store: dist.Store,
        *,
        receivers: int = 1,
        receiver: int | None = None,
        bucket_bytes: int = 512 << 20,
        slots: int = 2,
        device: str | torch.device = "cpu",
        timeout_s: float = 600.0,
    ) -> None:
        if receiver is not None and not 0 <= receiver < receivers:
            raise WeightSyncError(f"receiver={receiver} is outside the {receivers} receivers, which count from 0")
        self.store = dist.PrefixStore("verl-weights", store)
        self.receivers = receivers
        self.receiver = receiver
        self.bucket_bytes = bucket_bytes
        self.device = torch.device(device)
        self.timeout = timedelta(seconds=timeout_s)
        self._slots: list[_Slot | None] = [None] * slots
        self._opened: dict[str, tuple[_Slot, Tensor]] = {}
        self._number = 0  # messages so far, over all versions
        self._version = -1

    # ---- sender -------------------------------------------------------------------------------------------------

    def send(self, version: int, weights: Weights, *, live: bool = False) -> int:
        """See :meth:`Transport.send`; returns when the last bucket is in its slot."""
        if self.receiver is not None:
            raise WeightSyncError(f"receiver {self.receiver} of the shared memory cannot send")
        require_newer(version, self._version)
        self._version = version
        sent = 0
        for message, _ in messages(version, weights, self.bucket_bytes, self._next_buffer):
            slot = self._slots[self._number % len(self._slots)]
            assert slot is not None
            if self.device.type == "cuda":  # a receiver does not know the stream that filled the slot
                torch.cuda.current_stream(self.device).synchronize()
            header = pickle.dumps((slot.address, message.encode()))
            self.store.set(f"message/{self._number}", header)  # type: ignore[arg-type]
            self._number += 1
            sent += message.nbytes
        return sent

    def _next_buffer(self) -> Tensor:
        index = self._number % len(self._slots)
        self._wait_for_readers(self._number - len(self._slots))
        slot = self._slots[index]
        if slot is None:
            slot = self._slots[index] = _make_slot(self.bucket_bytes, self.device)
        return slot.buffer

    def _wait_for_readers(self, number: int) -> None:
        """Until every receiver is done with a message; its keys are then dropped."""
        if number < 0:
            return
        keys = [f"done/{number}/{receiver}" for receiver in range(self.receivers)]
        missing = "".join(f"\n  {key}" for key in keys)
        self._wait(keys, f"a receiver to read bucket {number} of shared memory (waiting for{missing})")
        slot = self._slots[number % len(self._slots)]
        if slot is not None:
            slot.forget_name()  # all have it open: it goes away with the processes, however they end
        for key in (*keys, f"message/{number}"):
            with contextlib.suppress(RuntimeError):  # not every store can delete
                self.store.delete_key(key)

    # ---- receiver -----------------------------------------------------------------------------------------------

    def receive(self, *, newer_than: int = -1) -> Delivery:
        """See :meth:`Transport.receive`."""
        if self.receiver is None:
            raise WeightSyncError("the sender of the shared memory cannot receive")
        message, buffer = self._next_message(f"weights newer than version {newer_than}")
        try:
            require_newer(message.version, newer_than)
        except WeightSyncError:
            self._skip(message)
            raise
        return Delivery(message.version, False, self._buckets(message, buffer))

    def _buckets(self, message: Message, buffer: Tensor) -> Generator[Bucket, None, None]:
        unpacker = Unpacker()
        while True:
            try:
                bucket = unpacker.take(message, buffer)
                if bucket:
                    yield bucket
            except BaseException:  # also when the consumer stops drawing
                self._skip(message)
                raise
            self._done()
            if message.last:
                return
            message, buffer = self._next_message(f"the rest of version {message.version}")

    def _skip(self, message: Message) -> None:
        """Let the sender go on with a version that this side gave up."""
        self._done()
        while not message.last:
            message, _ = self._next_message(f"the rest of version {message.version}")
            self._done()

    def _next_message(self, what: str) -> tuple[Message, Tensor]:
        key = f"message/{self._number}"
        self._wait([key], what)
        address, encoded = plain_pickle.loads(self.store.get(key), _OF_CUDA_HANDLES)
        name = repr(address)
        if name not in self._opened:
            slot = _open_slot(address)
            self._opened[name] = (slot, slot.buffer)
        return Message.decode(encoded), self._opened[name][1]

    def _done(self) -> None:
        for slot, _ in self._opened.values():
            slot.synchronize()
        self.store.set(f"done/{self._number}/{self.receiver}", "1")
        self._number += 1

    def _wait(self, keys: list[str], what: str) -> None:
        try:
            self.store.wait(keys, self.timeout)
        except RuntimeError as error:
            raise WeightSyncError(
                f"waited {self.timeout.total_seconds():.0f} s for {what}: {error}; is the other side alive?"
            ) from error

    def close(self) -> None:
        """Drop the slots; a sender first waits for the receivers to read the last buckets."""
        try:
            if self.receiver is None:
                for number in range(max(0, self._number - len(self._slots)), self._number):
                    self._wait_for_readers(number)
        finally:
            self._drop()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._drop()

    def _drop(self) -> None:
        for slot in self._slots:
            if slot is not None:
                slot.forget_name()
        self._slots = [None] * len(self._slots)
        self._opened.clear()


@dataclass(eq=False)
class _Slot:
    """Memory that another process can open by ``address``."""

    address: tuple[str, Any]
    buffer: Tensor
    unlink: Callable[[], object] | None = None

    def forget_name(self) -> None:
        if self.unlink is not None:
            self.unlink()
            self.unlink = None

    def synchronize(self) -> None:
        """Wait until reads of the slot that were started are over."""
        if self.buffer.device.type == "cuda":
            torch.cuda.current_stream(self.buffer.device).synchronize()


def _make_slot(size: int, device: torch.device) -> _Slot:
    if device.type == "cuda":
        buffer = torch.empty(size, dtype=torch.uint8, device=device)
        return _Slot(("cuda", cuda_handle(buffer)), buffer)
    if hasattr(os, "memfd_create"):  # memory without a name: nothing to leave behind, however this process ends
        fd = os.memfd_create("verl-weights", os.MFD_CLOEXEC)
        path, where = f"/proc/{os.getpid()}/fd/{fd}", "memory"
        release: Callable[[], object] = partial(_close, fd)
    else:
        folder = Path(tempfile.gettempdir())
        path, where = str(folder / owned_name("weights")), str(folder)
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        release = partial(_remove, fd, path)
    try:
        if size > psutil.virtual_memory().available:  # nothing else limits memory without a name
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        if hasattr(os, "posix_fallocate"):  # a hole would be found full only when written to, by a signal
            os.posix_fallocate(fd, 0, size)
        else:
            os.ftruncate(fd, size)
        buffer = torch.frombuffer(mmap.mmap(fd, size), dtype=torch.uint8)
    except OSError as error:
        release()
        raise WeightSyncError(
            f"cannot get {format_bytes(size)} of shared memory ({where}): {error}; free memory, or use smaller buckets "
            "(rollout.update_weights_bucket_megabytes)"
        ) from error
    slot = _Slot(("file", (path, size)), buffer)
    slot.unlink = weakref.finalize(slot, release)  # also at exit
    return slot


def _close(fd: int) -> None:
    with contextlib.suppress(OSError):
        os.close(fd)


def _remove(fd: int, path: str) -> None:
    _close(fd)
    with contextlib.suppress(OSError):
        os.unlink(path)


def _open_slot(address: tuple[str, Any]) -> _Slot:
    kind, value = address
    if kind == "cuda":
        return _Slot(address, open_cuda_handle(value))
    path, size = value
    try:
        fd = os.open(path, os.O_RDWR)
    except OSError as error:
        raise WeightSyncError(
            f"cannot open the sender's shared memory {path}: {error}; sender and receivers must be on one machine, in "
            "one container, and be the same user"
        ) from error
    try:
        return _Slot(address, torch.frombuffer(mmap.mmap(fd, size), dtype=torch.uint8))
    finally:
        os.close(fd)


def cuda_handle(tensor: Tensor) -> tuple[str, tuple[Any, ...]]:
    """What another process on the same GPU needs to open a CUDA tensor: (the GPU's UUID, torch's own handle)."""
    from torch.multiprocessing.reductions import reduce_tensor

    uid = str(torch.cuda.get_device_properties(tensor.device).uuid)
    return uid, reduce_tensor(tensor)[1]


def open_cuda_handle(handle: tuple[str, tuple[Any, ...]]) -> Tensor:
    """The tensor behind :func:`cuda_handle`, which the sender must keep.

    Raises:
        WeightSyncError: this process does not see that GPU.
    """
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    uid, arguments = handle
    seen = [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
    if uid not in seen:
        raise WeightSyncError(
            f"the sender's weights are on GPU {uid}, this process sees {', '.join(seen) or 'none'}; CUDA IPC needs the "
            "same GPU, other placements need the broadcast transport"
        )
    tensor: Tensor = rebuild_cuda_tensor(*on_device(arguments, seen.index(uid)))
    return tensor


def on_device(arguments: tuple[Any, ...], index: int) -> tuple[Any, ...]:
    """The arguments of torch's ``rebuild_cuda_tensor`` with this process's number of the GPU.

    Processes may count GPUs differently (``CUDA_VISIBLE_DEVICES``); the seventh argument is the sender's number.
    """
    return (*arguments[:6], index, *arguments[7:])
