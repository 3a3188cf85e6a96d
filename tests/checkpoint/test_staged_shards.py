"""Copies for background saves are the files that torch would have written, in memory."""

from __future__ import annotations

import hashlib
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader

from verl.checkpoint.plain_state import PlainReader
from verl.checkpoint.staged_shards import StagedShard


def some_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(1200, 1100, generator=generator)  # more than one piece of the writer
    return {
        "wide": wide,
        "turned": wide[:7, :5].t(),  # neither contiguous nor alone in its storage
        "half": torch.randn(3, 5, generator=generator).bfloat16(),
        "small": torch.randn(6, generator=generator).to(torch.float8_e4m3fn),
        "counter.step": torch.tensor(7.0 + seed),
        "flags": torch.tensor([True, False, seed > 0]),
        "nothing": torch.empty(0, 3),
        "long": torch.arange(5) + seed,
    }


def read(directory: Path, reader: type[FileSystemReader]) -> dict[str, torch.Tensor]:
    tensors = {name: torch.zeros_like(tensor) for name, tensor in some_tensors().items()}
    dcp.load(tensors, storage_reader=reader(directory), no_dist=True)
    return tensors


def assert_equal(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype
        assert torch.equal(actual[name].float(), tensor.float()), name


@pytest.mark.parametrize("reader", [PlainReader, FileSystemReader])
def test_what_was_copied_is_read_back(tmp_path: Path, reader: type[FileSystemReader]) -> None:
    tensors = some_tensors()
    image = StagedShard(tensors, world=1)
    image.fill(tensors)
    for tensor in tensors.values():  # the training goes on
        tensor.zero_()
    image.write(tmp_path)
    assert_equal(read(tmp_path, reader), some_tensors())


def test_the_memory_serves_again(tmp_path: Path) -> None:
    image = StagedShard(some_tensors(), world=1)
    for seed in (1, 2):
        assert image.fits(some_tensors(seed))
        image.fill(some_tensors(seed))
        (tmp_path / str(seed)).mkdir()
        image.write(tmp_path / str(seed))
    for seed in (1, 2):
        assert_equal(read(tmp_path / str(seed), PlainReader), some_tensors(seed))


def test_no_tensor_is_kept_alive() -> None:
    tensors = {"a": torch.ones(3)}
    image = StagedShard(tensors, world=1)
    gone = weakref.ref(tensors.pop("a"))
    assert gone() is None
    tensors["a"] = torch.ones(3)
    image.fill(tensors)
    gone = weakref.ref(tensors.pop("a"))
    assert gone() is None


def test_other_tensors_need_other_memory() -> None:
    tensors = some_tensors()
    image = StagedShard(tensors, world=1)
    assert not image.fits({**tensors, "more": torch.zeros(1)})
    assert not image.fits({**tensors, "half": tensors["half"].float()})
    assert not image.fits({**tensors, "long": torch.arange(6)})
    assert image.nbytes == pytest.approx(sum(tensor.nbytes for tensor in tensors.values()), abs=8 * 3000)


def test_the_description_is_the_one_that_torch_writes(tmp_path: Path) -> None:
    tensors = some_tensors()
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.mkdir()
    image = StagedShard(tensors, world=1)
    image.fill(tensors)
    image.write(ours)
    dcp.save(tensors, checkpoint_id=theirs, no_dist=True)
    assert sorted(path.name for path in ours.iterdir()) == sorted(path.name for path in theirs.iterdir())
    mine, expected = PlainReader(ours).read_metadata(), PlainReader(theirs).read_metadata()
    assert mine.state_dict_metadata == expected.state_dict_metadata
    assert mine.planner_data == expected.planner_data
    assert {(index, place.length) for index, place in mine.storage_data.items()} == {
        (index, place.length) for index, place in expected.storage_data.items()
    }


def test_checksums_are_those_of_the_files(tmp_path: Path) -> None:
    image = StagedShard(some_tensors(), world=1)
    image.fill(some_tensors())
    digests = image.write(tmp_path)
    assert digests == {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in tmp_path.iterdir()}
    assert sorted(digests) == [".metadata", "__0_0.distcp"]


def test_saving_leaves_checks_of_other_files_as_they_are() -> None:
    before = torch.serialization.get_crc32_options()
    StagedShard(some_tensors(), world=1)
    assert torch.serialization.get_crc32_options() == before is True
