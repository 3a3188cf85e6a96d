"""A data loader that continues exactly where a checkpoint left it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from verl.data.collate import collate_fn
from verl.errors import CheckpointError, DataError
from verl.utils.seeding import derive_seed

if TYPE_CHECKING:
    from verl.config import DataConfig, ExamplesConfig

logger = logging.getLogger(__name__)


class EpochSampler(Sampler[list[int]]):
    """Batches of row numbers for one epoch, starting at any sample of it.

    The order of an epoch depends on (seed, epoch) alone, so that it can be made again without replaying anything.

    Args:
        size: rows of the data set.
        batch_size: rows per batch, over all ranks.
        shuffle: another order in every epoch.
        seed: seed of the orders.
        drop_last: leave out a last batch that is not full.
        rank: this process's rank; it gets every ``world_size``-th row of each batch, possibly none of a short one.
        world_size: how many processes share each batch.
    """

    def __init__(
        self,
        size: int,
        batch_size: int,
        *,
        shuffle: bool,
        seed: int,
        drop_last: bool,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.size, self.batch_size, self.shuffle, self.seed, self.drop_last = size, batch_size, shuffle, seed, drop_last
        self.rank, self.world_size = rank, world_size
        self.epoch = 0
        self.start = 0

    def order(self, epoch: int) -> list[int]:
        """The row numbers of an epoch, in order."""
        if not self.shuffle:
            return list(range(self.size))
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "data", "epoch", epoch))
        return [int(i) for i in torch.randperm(self.size, generator=generator)]

    def __iter__(self) -> Iterator[list[int]]:
        order = self.order(self.epoch)
        for begin in range(self.start, self.size, self.batch_size):
            batch = order[begin : begin + self.batch_size]
            if len(batch) == self.batch_size or not self.drop_last:
                yield batch[self.rank :: self.world_size]

    def __len__(self) -> int:
        full, rest = divmod(self.size, self.batch_size)
        return full + (1 if rest and not self.drop_last else 0)


class ResumableDataLoader(DataLoader):
    """Batches of a map-style data set; iterating once is one epoch, each with its own shuffle.

    ``state_dict()`` says how many samples the caller has *received*, whatever the workers prefetched. After the last
    batch of an epoch it already points at the next epoch. A loader that loaded a state begins there; an iteration that
    was abandoned half-way and started anew begins its epoch anew.

    Args:
        dataset: has ``__len__`` and ``__getitem__``.
        sampler: the order.
        collate: from items to a batch.
        num_workers: processes that prepare batches; 0 prepares them when asked.
    """

    def __init__(
        self,
        dataset: Dataset,
        sampler: EpochSampler,
        *,
        collate: Callable[[list[Any]], Any] = collate_fn,
        num_workers: int = 0,
    ) -> None:
        # a generator of its own: iterating must not advance the global random state
        self._worker_seeds = torch.Generator()
        super().__init__(
            dataset,
            batch_sampler=sampler,
            collate_fn=collate,
            num_workers=num_workers,
            generator=self._worker_seeds,
        )
        self._order = sampler
        self._samples_done = 0
        self._resume = False

    @property
    def epoch(self) -> int:
        """Number of the epoch that the next batch belongs to, from 0."""
        return self.state_dict()["epoch"]

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        position = self.state_dict()
        self._order.epoch = position["epoch"]
        self._order.start = self._samples_done = position["samples_done"] if self._resume else 0
        self._resume = False
        self._worker_seeds.manual_seed(derive_seed(self._order.seed, "data", "workers", self._order.epoch))
        for batch in super().__iter__():
            # a short batch only ever ends an epoch, so counting it as a full one is harmless
            self._samples_done += self._order.batch_size
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Position and identity of the order: ``epoch``, ``samples_done``, ``seed``, ``size``, ``shuffle``."""
        usable = self._order.size - (self._order.size % self._order.batch_size if self._order.drop_last else 0)
        left = usable - self._samples_done
        # fewer samples left than a batch, where short batches are dropped, is an epoch that has ended
        over = left <= 0 or (self._order.drop_last and self._order.size - self._samples_done < self._order.batch_size)
        return {
            "epoch": self._order.epoch + (1 if over else 0),
            "samples_done": 0 if over else self._samples_done,
            "seed": self._order.seed,
            "size": self._order.size,
            "shuffle": self._order.shuffle,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`; another batch size continues at the same sample.

        Raises:
            CheckpointError: the state belongs to another order (other data size, seed or shuffle).
        """
        here = self.state_dict()
        for key in ("size", "seed", "shuffle"):
            if key not in state:
                raise CheckpointError(f"the data loader state has no {key!r}; it was not written by this loader")
            if state[key] != here[key]:
                raise CheckpointError(
                    f"the checkpoint's data order has {key}={state[key]!r}, this run has {here[key]!r}; resume with "
                    "the same data files, data.seed and data.shuffle, or start a new run (trainer.resume_mode=disable) "
                    "from the checkpoint's weights, which `verl merge` turns into a model for model.path"
                )
        self._order.epoch = int(state["epoch"])
        self._samples_done = int(state["samples_done"])
        self._resume = True


def create_dataloader(
    dataset: Dataset,
    config: DataConfig | ExamplesConfig,
    *,
    batch_size: int,
    shuffle: bool,
    seed: int,
    drop_last: bool,
    collate: Callable[[list[Any]], Any] = collate_fn,
    rank: int = 0,
    world_size: int = 1,
) -> ResumableDataLoader:
    """A loader over a data set.

    Args:
        dataset: a map-style data set.
        config: the ``data`` section; gives ``dataloader_num_workers``.
        batch_size: samples per batch, over all ranks.
        shuffle: a new order in each epoch, a function of ``seed`` and the epoch.
        drop_last: leave out a last batch that is not full (training); keep it (validation).
        collate: makes a batch of items.
        rank: this process's rank among ``world_size`` that share each batch; the state is the same on all of them.
        world_size: how many processes share each batch.

    Raises:
        DataError: ``drop_last`` and fewer samples than one batch.
    """
    size = len(dataset)  # type: ignore[arg-type]
    if batch_size < 1:
        raise DataError(f"batch size {batch_size}: must be at least 1")
    if size == 0 or (drop_last and size < batch_size):
        raise DataError(
            f"{size} samples do not fill one batch of {batch_size}; give more data or a smaller data.train_batch_size"
        )
    sampler = EpochSampler(
        size, batch_size, shuffle=shuffle, seed=seed, drop_last=drop_last, rank=rank, world_size=world_size
    )
    return ResumableDataLoader(dataset, sampler, collate=collate, num_workers=config.dataloader_num_workers or 0)
