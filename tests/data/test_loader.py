"""Order, epochs and exact continuation."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from verl.config import DataConfig
from verl.data import ResumableDataLoader, create_dataloader
from verl.errors import CheckpointError, DataError


class Numbers(Dataset):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": torch.tensor(index)}


def loader(size: int = 10, workers: int = 0, **settings: Any) -> ResumableDataLoader:
    options = {"batch_size": 3, "shuffle": True, "seed": 5, "drop_last": True} | settings
    return create_dataloader(Numbers(size), DataConfig(dataloader_num_workers=workers), **options)


def epoch(data: ResumableDataLoader) -> list[list[int]]:
    return [batch["x"].tolist() for batch in data]


def test_unshuffled_epochs_and_the_last_short_batch() -> None:
    assert epoch(loader(shuffle=False)) == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert epoch(loader(shuffle=False, drop_last=False)) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
    assert len(loader()) == 3
    assert len(loader(drop_last=False)) == 4


def test_shuffle_is_a_function_of_seed_and_epoch() -> None:
    data = loader(drop_last=False)
    first, second = epoch(data), epoch(data)
    assert sorted(chain(*first)) == sorted(chain(*second)) == list(range(10))
    assert first != second
    again = loader(drop_last=False)
    torch.manual_seed(123)  # global randomness has no say
    assert [epoch(again), epoch(again)] == [first, second]
    assert epoch(loader(drop_last=False, seed=6)) != first


def test_iterating_leaves_the_global_random_state_alone() -> None:
    before = torch.get_rng_state()
    epoch(loader())
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(("drop_last", "workers"), [(True, 0), (False, 0), (False, 1)])
def test_continuation_is_exact_after_every_batch(drop_last: bool, workers: int) -> None:
    reference = loader(drop_last=drop_last)
    stream = [batch for _ in range(3) for batch in epoch(reference)]
    for done in range(len(stream) + 1) if workers == 0 else (2, 4):
        data = loader(drop_last=drop_last, workers=workers)
        seen: list[list[int]] = []
        while len(seen) < done:
            for batch in data:
                seen.append(batch["x"].tolist())
                if len(seen) == done:
                    break
        state = data.state_dict()
        resumed = loader(drop_last=drop_last, workers=workers)
        resumed.load_state_dict(state)
        assert resumed.state_dict() == state
        rest: list[list[int]] = []
        while len(seen) + len(rest) < len(stream):
            rest += epoch(resumed)
        assert seen + rest == stream


def test_state_at_the_end_of_an_epoch_points_at_the_next() -> None:
    data = loader()
    batches = iter(data)
    for _ in range(3):
        next(batches)
    assert data.state_dict() == {"epoch": 1, "samples_done": 0, "seed": 5, "size": 10, "shuffle": True}
    assert data.epoch == 1


def test_an_abandoned_epoch_starts_anew() -> None:
    data = loader(shuffle=False)
    next(iter(data))
    assert epoch(data)[0] == [0, 1, 2]


def test_other_batch_size_continues_at_the_same_sample() -> None:
    data = loader(shuffle=False)
    next(iter(data))
    resumed = loader(shuffle=False, batch_size=2)
    resumed.load_state_dict(data.state_dict())
    assert epoch(resumed) == [[3, 4], [5, 6], [7, 8]]


@pytest.mark.parametrize(
    ("change", "name"), [({"size": 11}, "size"), ({"seed": 6}, "seed"), ({"shuffle": False}, "shuffle")]
)
def test_a_state_of_another_order_is_refused(change: dict[str, Any], name: str) -> None:
    state = loader().state_dict()
    with pytest.raises(CheckpointError, match=f"data order has {name}="):
        loader(**change).load_state_dict(state)


def test_too_little_data() -> None:
    with pytest.raises(DataError, match="2 samples do not fill one batch of 3"):
        loader(size=2)
    assert epoch(loader(size=2, drop_last=False, shuffle=False)) == [[0, 1]]


def test_ranks_share_each_batch() -> None:
    def part(rank: int) -> list[list[int]]:
        collate = lambda items: {"x": torch.tensor([int(i["x"]) for i in items])}  # noqa: E731
        settings = {"shuffle": False, "drop_last": False, "size": 7, "rank": rank, "world_size": 2}
        return epoch(loader(collate=collate, **settings))

    assert part(0) == [[0, 2], [3, 5], [6]]
    assert part(1) == [[1], [4], []]
