"""Transport through a directory: for sides that share nothing but a file system."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from verl import envs
from verl.errors import WeightSyncError
from verl.utils.fs import atomic_write_text, ensure_writable_dir, fsync_tree
from verl.workers.sharding_manager.transports.base import (
    Bucket,
    Delivery,
    Transport,
    Weights,
    in_buckets,
    require_newer,
)

LATEST = "latest_version.json"
INDEX = "model.safetensors.index.json"


class DiskTransport(Transport):
    """Versions as directories of safetensors files in the layout of a Hugging Face checkpoint.

    A version is written beside its place, forced to the disk and renamed; then the version file is replaced. A reader
    sees whole versions only. A sender that starts anew takes the directory over, with whatever version it sends first.

    Args:
        directory: that both sides see.
        bucket_bytes: size of a file, and of a bucket when reading; a larger tensor gets a file of its own.
        keep: versions to keep, so that a slow reader finds its files.
        timeout_s: how long ``receive`` waits.
        poll_s: how often it looks.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        bucket_bytes: int = 512 << 20,
        keep: int = 2,
        timeout_s: float = 600.0,
        poll_s: float = 0.05,
    ) -> None:
        if keep < 1:
            raise WeightSyncError(f"keep={keep}: at least the latest version must stay")
        self.directory = Path(directory)
        self.bucket_bytes = bucket_bytes
        self.keep = keep
        self.timeout_s = timeout_s
        self.poll_s = poll_s
        self._version: int | None = None  # last one sent by this object

    def send(self, version: int, weights: Weights, *, live: bool = False) -> int:
        """See :meth:`Transport.send`; returns when the version is on the disk."""
        ensure_writable_dir(self.directory, purpose="directory for weights")
        if self._version is None:
            self._take_over()
        else:
            require_newer(version, self._version)
        staging = self.directory / f".version-{version:08d}.{os.getpid()}.tmp"
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir()
        digests: dict[str, str] | None = {} if envs.get("VERL_SYNC_CHECK") else None
        files: dict[str, str] = {}
        total = 0
        try:
            for number, bucket in enumerate(in_buckets(weights, self.bucket_bytes), start=1):
                name = f"model-{number:05d}.safetensors"
                tensors = _separate(bucket)
                save_file(tensors, staging / name, metadata={"format": "pt"})
                for key, tensor in tensors.items():
                    files[key] = name
                    total += tensor.nbytes
                    if digests is not None:
                        digests[key] = _digest(tensor)
            index = {
                "metadata": {"total_size": total, "version": version, "digests": digests},
                "weight_map": files,
            }
            (staging / INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")
            fsync_tree(staging)
            final = self.directory / f"version-{version:08d}"
            shutil.rmtree(final, ignore_errors=True)
            staging.rename(final)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise
        atomic_write_text(self.directory / LATEST, json.dumps({"version": version, "directory": final.name}))
        self._version = version
        self._prune()
        return total

    def _take_over(self) -> None:
        """Forget what an earlier run left: its versions could be higher than this run's first."""
        (self.directory / LATEST).unlink(missing_ok=True)
        for old in [*self.directory.glob("version-*"), *self.directory.glob(".version-*.tmp")]:
            shutil.rmtree(old, ignore_errors=True)

    def _prune(self) -> None:
        for old in sorted(self.directory.glob("version-*"))[: -self.keep]:
            shutil.rmtree(old, ignore_errors=True)

    def receive(self, *, newer_than: int = -1) -> Delivery:
        """See :meth:`Transport.receive`; takes the latest version and passes over those in between."""
        deadline = time.monotonic() + self.timeout_s
        while True:
            latest = self._latest()
            if latest is not None and latest["version"] > newer_than:
                folder = self.directory / latest["directory"]
                return Delivery(latest["version"], False, self._buckets(folder))
            if time.monotonic() >= deadline:
                known = "nothing" if latest is None else f"version {latest['version']}"
                raise WeightSyncError(
                    f"waited {self.timeout_s:g} s for weights newer than version {newer_than} in {self.directory}, "
                    f"which has {known}; is the trainer alive and does it write there?"
                )
            time.sleep(self.poll_s)

    def _latest(self) -> dict[str, Any] | None:
        try:
            found: dict[str, Any] = json.loads((self.directory / LATEST).read_text("utf-8"))
        except FileNotFoundError:
            return None
        return found

    def _buckets(self, folder: Path) -> Generator[Bucket, None, None]:
        try:
            index = json.loads((folder / INDEX).read_text("utf-8"))
            digests = index["metadata"]["digests"]
            by_file: dict[str, list[str]] = {}
            for name, file in index["weight_map"].items():
                by_file.setdefault(file, []).append(name)
            for file, names in by_file.items():
                with safe_open(folder / file, framework="pt") as reader:
                    bucket = [(name, reader.get_tensor(name)) for name in names]
                for name, tensor in bucket:
                    if digests is not None and _digest(tensor) != digests[name]:
                        raise WeightSyncError(f"{name!r} in {folder / file} is not what was written: digests differ")
                yield bucket
        except (FileNotFoundError, SafetensorError) as error:
            raise WeightSyncError(
                f"the version in {folder} could not be read: {error}; if the trainer replaced it meanwhile, receive "
                "again or keep more versions"
            ) from error


def _separate(bucket: Bucket) -> dict[str, Tensor]:
    """Contiguous tensors of which no two share memory, as the format wants them."""
    seen: set[int] = set()
    tensors = {}
    for name, tensor in bucket:
        tensor = tensor.detach().contiguous()
        place = tensor.untyped_storage().data_ptr()
        if place in seen and tensor.numel():
            tensor = tensor.clone()
        seen.add(place)
        tensors[name] = tensor
    return tensors


def _digest(tensor: Tensor) -> str:
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).cpu().numpy()
    return hashlib.blake2b(raw.tobytes(), digest_size=16).hexdigest()
