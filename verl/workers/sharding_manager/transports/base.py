"""The way weights take from the training side to the rollout side: the interface, and how tensors become messages."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from types import TracebackType

import torch
from torch import Tensor

from verl import envs
from verl.errors import WeightSyncError

Bucket = list[tuple[str, Tensor]]
Weights = Iterable[tuple[str, Tensor]]

#: where a tensor begins in a message; enough for every dtype
ALIGNMENT = 64


@dataclass(frozen=True)
class Delivery:
    """The weights of one version as they arrive.

    Attributes:
        version: policy version.
        live: the tensors are the sender's own and stay valid; otherwise each bucket is valid until the next is drawn.
        buckets: the tensors, in the order in which they were sent; to be closed when not drawn to the end.
    """

    version: int
    live: bool
    buckets: Generator[Bucket, None, None]


class Transport(ABC):
    """Carries named tensors, version by version, from one sender to one or more receivers.

    Both sides make one each, from the same address (a store, a group, a directory). What arrives is bit for bit what
    was sent; with ``VERL_SYNC_CHECK=1`` on the sending side, digests travel with the tensors and are compared on
    arrival. If the sender fails half way, receivers get an error instead of the rest.
    """

    @abstractmethod
    def send(self, version: int, weights: Weights, *, live: bool = False) -> int:
        """Hand over all weights of a version.

        Args:
            version: higher than any before.
            weights: (name, whole tensor), drawn once; a tensor need only be valid until the next one is drawn.
            live: the tensors stay valid and may be read in place.

        Returns:
            Bytes that were written or sent; 0 where the receiver reads the sender's own memory.

        Raises:
            WeightSyncError: the version does not increase, or a receiver is gone.
        """

    @abstractmethod
    def receive(self, *, newer_than: int = -1) -> Delivery:
        """Wait for a version higher than ``newer_than``.

        Raises:
            WeightSyncError: nothing came in time, the version is not newer, or, while buckets are drawn, the sender
                failed or a tensor changed on the way.
        """

    def close(self) -> None:  # noqa: B027 - most have nothing to give back
        """Give back what the transport holds; tensors that came through it may become invalid."""

    def __enter__(self) -> Transport:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def require_newer(version: int, known: int) -> None:
    """Refuse a version that is not higher than ``known``."""
    if version <= known:
        raise WeightSyncError(
            f"weights of version {version} were offered, but version {known} was synced already; versions must "
            "increase with every weight sync"
        )


def in_buckets(weights: Weights, limit: int) -> Generator[Bucket, None, None]:
    """Group tensors up to ``limit`` bytes, without copying; a larger tensor is a bucket of its own."""
    bucket: Bucket = []
    size = 0
    for name, tensor in weights:
        if bucket and size + tensor.nbytes > limit:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket


@dataclass(frozen=True)
class Entry:
    """A tensor, or a piece of one that is too large for a message.

    Attributes:
        name, dtype, shape: of the whole tensor.
        begin, nbytes: which bytes of the tensor.
        position: where they are in the message.
        digest: of the whole tensor, with its last piece; None when digests are off.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    nbytes: int
    position: int
    digest: str | None = None


@dataclass(frozen=True)
class Message:
    """What one filled buffer holds.

    Attributes:
        version: policy version.
        entries: contents in order.
        nbytes: used bytes of the buffer.
        last: no further message of this version follows.
        digests: whether tensors come with digests.
        failure: why the sender stopped; the version is then incomplete.
    """

    version: int
    entries: tuple[Entry, ...] = ()
    nbytes: int = 0
    last: bool = False
    digests: bool = False
    failure: str | None = None

    def encode(self) -> bytes:
        """As JSON."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> Message:
        """Inverse of :meth:`encode`."""
        raw = json.loads(data)
        raw["entries"] = tuple(Entry(**{**entry, "shape": tuple(entry["shape"])}) for entry in raw["entries"])
        return cls(**raw)


def messages(
    version: int, weights: Weights, capacity: int, next_buffer: Callable[[], Tensor]
) -> Iterator[tuple[Message, Tensor]]:
    """Pack tensors into flat buffers; an error of ``weights`` becomes a last message and is raised again.

    Args:
        version: policy version.
        weights: (name, tensor).
        capacity: bytes of a buffer.
        next_buffer: gives the (capacity,) uint8 buffer to fill next, once per message and not before it is needed.

    Yields:
        The message and its filled buffer, which must be out of use before ``next_buffer`` gives it again.
    """
    packer = _Packer(version, capacity, next_buffer, digests=bool(envs.get("VERL_SYNC_CHECK")))
    try:
        for name, tensor in weights:
            yield from packer.add(name, tensor.detach())
    except BaseException as error:
        yield packer.flush(last=True, failure=f"{type(error).__name__}: {error}")
        raise
    yield packer.flush(last=True)


class _Packer:
    def __init__(self, version: int, capacity: int, next_buffer: Callable[[], Tensor], *, digests: bool) -> None:
        self.version = version
        self.capacity = capacity
        self.next_buffer = next_buffer
        self.digests = digests
        self.buffer: Tensor | None = None
        self.used = 0
        self.entries: list[Entry] = []

    def add(self, name: str, tensor: Tensor) -> Iterator[tuple[Message, Tensor]]:
        hasher = hashlib.blake2b(digest_size=16) if self.digests else None
        whole = tensor.nbytes
        begin = 0
        if whole <= self.capacity < self._aligned() + whole:
            yield self.flush()
        flat = tensor.reshape(-1) if whole > self.capacity else tensor
        while True:
            start = self._aligned()
            room = (self.capacity - start) // tensor.element_size() * tensor.element_size()
            if whole and room <= 0:
                yield self.flush()
                continue
            size = min(room, whole - begin)
            if self.buffer is None:
                self.buffer = self.next_buffer()
            place = self.buffer[start : start + size]
            if size == whole:
                place.view(tensor.dtype).view(tensor.shape).copy_(tensor)
            else:
                first = begin // tensor.element_size()
                place.view(tensor.dtype).copy_(flat[first : first + size // tensor.element_size()])
            if hasher is not None:
                hasher.update(place.cpu().numpy().tobytes())
            done = begin + size == whole
            digest = hasher.hexdigest() if hasher is not None and done else None
            dtype = str(tensor.dtype).removeprefix("torch.")
            self.entries.append(Entry(name, dtype, tuple(tensor.shape), begin, size, start, digest))
            self.used = start + size
            begin += size
            if done:
                return

    def flush(self, *, last: bool = False, failure: str | None = None) -> tuple[Message, Tensor]:
        message = Message(self.version, tuple(self.entries), self.used, last, self.digests, failure)
        buffer = self.next_buffer() if self.buffer is None else self.buffer
        self.buffer, self.used, self.entries = None, 0, []
        return message, buffer

    def _aligned(self) -> int:
        return -(-self.used // ALIGNMENT) * ALIGNMENT


@dataclass
class Unpacker:
    """Turns messages back into tensors; pieces of large tensors are put together."""

    _open: dict[str, Tensor] = field(default_factory=dict)
    _hashers: dict[str, hashlib.blake2b] = field(default_factory=dict)

    def take(self, message: Message, buffer: Tensor) -> Bucket:
        """The tensors that are complete now: views of ``buffer``, or for a large one its own memory.

        Raises:
            WeightSyncError: the sender failed, or a tensor is not what was sent.
        """
        bucket: Bucket = []
        for entry in message.entries:
            dtype = getattr(torch, entry.dtype)
            piece = buffer[entry.position : entry.position + entry.nbytes]
            whole = int(torch.Size(entry.shape).numel()) * dtype.itemsize
            if message.digests:
                self._verify(entry, piece, final=entry.begin + entry.nbytes == whole)
            if entry.nbytes == whole:
                bucket.append((entry.name, piece.view(dtype).view(entry.shape)))
                continue
            tensor = self._open.get(entry.name)
            if tensor is None:
                tensor = self._open[entry.name] = torch.empty(entry.shape, dtype=dtype, device=buffer.device)
            tensor.view(-1).view(torch.uint8)[entry.begin : entry.begin + entry.nbytes].copy_(piece)
            if entry.begin + entry.nbytes == whole:
                bucket.append((entry.name, self._open.pop(entry.name)))
        if message.failure is not None:
            raise WeightSyncError(
                f"the sender of version {message.version} failed half way ({message.failure}); the weights that "
                "arrived are incomplete and must not be used"
            )
        return bucket

    def _verify(self, entry: Entry, piece: Tensor, *, final: bool) -> None:
        hasher = self._hashers.setdefault(entry.name, hashlib.blake2b(digest_size=16))
        hasher.update(piece.cpu().numpy().tobytes())
        if final:
            del self._hashers[entry.name]
            if hasher.hexdigest() != entry.digest:
                raise WeightSyncError(
                    f"{entry.name!r} changed on its way: digest {hasher.hexdigest()} instead of {entry.digest}"
                )
