"""Checkpoints from elsewhere cannot run code."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from verl.checkpoint.plain_state import PlainReader, check_plain
from verl.errors import CheckpointError
from verl.utils import plain_pickle


class Runs:
    """Unpickling it makes a directory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    dcp.save({"a": torch.arange(6.0).view(2, 3), "b.c": torch.ones(2, dtype=torch.bfloat16)}, checkpoint_id=directory)
    return directory


def read(directory: Path) -> dict[str, torch.Tensor]:
    tensors = {"a": torch.zeros(2, 3), "b.c": torch.zeros(2, dtype=torch.bfloat16)}
    dcp.load(tensors, storage_reader=PlainReader(directory), no_dist=True)
    return tensors


def test_tensors_are_read_as_torch_reads_them(saved: Path) -> None:
    tensors = read(saved)
    assert tensors["a"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert tensors["b.c"].tolist() == [1, 1]
    metadata, expected = PlainReader(saved).read_metadata(), dcp.FileSystemReader(saved).read_metadata()
    assert metadata.state_dict_metadata == expected.state_dict_metadata
    check_plain(saved)


@pytest.mark.parametrize("file", [".metadata", "__0.metadata"])
@pytest.mark.parametrize("reader", [read, check_plain])
def test_a_description_that_would_run_code_is_refused(
    saved: Path, tmp_path: Path, reader: Callable[[Path], Any], file: str
) -> None:
    (saved / ".metadata").unlink()  # torch then looks for one of its rank
    (saved / file).write_bytes(pickle.dumps(Runs(tmp_path / "ran")))
    with pytest.raises((CheckpointError, dcp.CheckpointException, FileNotFoundError)):
        reader(saved)
    assert not (tmp_path / "ran").exists()


def test_the_message_names_what_it_refers_to(saved: Path, tmp_path: Path) -> None:
    (saved / ".metadata").write_bytes(pickle.dumps(Runs(tmp_path / "ran")))
    with pytest.raises(CheckpointError, match=r"\.metadata .*it refers to posix\.mkdir"):
        PlainReader(saved).read_metadata()


def test_entries_that_are_no_tensors(tmp_path: Path) -> None:
    """Megatron-core stores plain ones; a model of ours has none, whatever they hold."""
    dcp.save({"a": torch.zeros(2, 3), "note": {"x": [1, "y"]}}, checkpoint_id=tmp_path / "plain")
    dcp.save({"a": torch.zeros(2, 3), "note": Runs(tmp_path / "ran")}, checkpoint_id=tmp_path / "code")
    check_plain(tmp_path / "plain")
    for name in ("plain", "code"):
        with pytest.raises(CheckpointError, match="note.* pickled objects where tensors are expected"):
            PlainReader(tmp_path / name).read_metadata()
    with pytest.raises(CheckpointError, match="'note' is no plain data"):
        check_plain(tmp_path / "code")
    assert not (tmp_path / "ran").exists()


def test_pickles_of_data_refer_to_what_was_named_only(tmp_path: Path) -> None:
    data = pickle.dumps(("file", ("/dev/shm/x", 12), torch.Size([2]), torch.bfloat16))
    assert plain_pickle.loads(data, {"torch.Size"}) == ("file", ("/dev/shm/x", 12), torch.Size([2]), torch.bfloat16)
    with pytest.raises(pickle.UnpicklingError, match=r"torch\.Size"):
        plain_pickle.loads(data, ())
    with pytest.raises(pickle.UnpicklingError, match="mkdir"):
        plain_pickle.loads(pickle.dumps(Runs(tmp_path / "ran")), {"torch.Size"})
    assert not (tmp_path / "ran").exists()
