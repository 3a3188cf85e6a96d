"""Transports between processes: trainers on ranks 0 and 1, rollouts on ranks 2 and 3."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.workers.engine.ranks import run_ranks
from tests.workers.rollout.helpers import (
    generate,
    make_engine,
    make_model,
    random_prompts,
    reference_logits,
    weights_of,
)
from verl.errors import WeightSyncError
from verl.utils.owned import Owner
from verl.workers.rollout.types import SamplingParams
from verl.workers.sharding_manager import Transport, WeightReceiver, WeightSender
from verl.workers.sharding_manager.transports.broadcast import BroadcastTransport, transfer_group
from verl.workers.sharding_manager.transports.colocated import SharedMemoryTransport
from verl.workers.sharding_manager.transports.disk import DiskTransport

BUCKET = 1 << 13


class HalfSource:
    """Each trainer has half of every tensor; the whole is gathered over both."""

    def __init__(self, model: torch.nn.Module, rank: int, group: dist.ProcessGroup) -> None:
        self.group = group
        self.shapes = {name: tensor.shape for name, tensor in weights_of(model).items()}
        self.halves = {
            name: torch.stack(tensor.detach().reshape(-1).chunk(2))[rank].clone()
            for name, tensor in weights_of(model).items()
        }

    def local_tensors(self) -> dict[str, torch.Tensor] | None:
        return None

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, half in self.halves.items():
            whole = torch.empty(2, half.numel())
            dist.all_gather(list(whole.unbind()), half, group=self.group)
            yield name, whole.view(self.shapes[name])


def make_transport(kind: str, rank: int, folder: Path, timeout_s: float = 30) -> Transport | None:
    """What each rank has; rank 1 only helps to gather."""
    if rank == 1:
        return None
    if kind == "disk":
        return DiskTransport(folder / "weights", bucket_bytes=BUCKET, timeout_s=timeout_s)
    store = dist.FileStore(str(folder / f"{kind}.store"), -1)
    place = max(0, rank - 1)
    if kind == "broadcast":
        return BroadcastTransport(transfer_group(store, place, 3, timeout_s=timeout_s), bucket_bytes=BUCKET)
    receiver = None if rank == 0 else place - 1
    return SharedMemoryTransport(store, receivers=2, receiver=receiver, bucket_bytes=BUCKET, timeout_s=timeout_s)


def cases(rank: int, folder: str) -> None:
    os.environ["VERL_SYNC_CHECK"] = "1"
    trainers = dist.new_group([0, 1])
    prompt = random_prompts([7])[0]
    engine = make_engine(make_model("qwen2"), Path(folder) / str(rank)) if rank > 1 else None
    version = 0
    for kind in ("broadcast", "shared_memory", "disk"):
        transport = make_transport(kind, rank, Path(folder))
        for seed in (version + 1, version + 2):
            version += 1
            model = make_model("qwen2", seed=seed)
            if engine is None:
                report = WeightSender(HalfSource(model, rank, trainers), transport).send(version)
                total = sum(tensor.nbytes for tensor in weights_of(model).values())
                assert report.bytes_sent == (total if rank == 0 else 0)
            else:
                assert transport is not None
                got = WeightReceiver(engine, transport).receive()
                assert got.version == engine.policy_version == version
                assert got.buckets > 1
                completion = generate(engine, [prompt], SamplingParams(4, seed=1, ignore_eos=True))[0]
                assert completion.policy_version == version
                logits = reference_logits(model, prompt, completion.token_ids)
                expected = logits.log_softmax(-1)[torch.arange(4), torch.tensor(completion.token_ids)]
                torch.testing.assert_close(torch.tensor(completion.log_probs), expected, atol=1e-5, rtol=0)
            dist.barrier()
        if transport is not None:
            transport.close()
    assert not [name for name in os.listdir("/dev/shm") if str(Owner.current()) in name]
    dist.barrier()
    # a sender that dies: every receiver gets an error within the time limit
    for kind in ("broadcast", "shared_memory"):
        transport = make_transport(kind, rank, Path(folder) / "dead", timeout_s=3)
        dist.barrier()
        if rank == 0:
            del transport
        elif engine is not None:
            assert transport is not None
            with pytest.raises(WeightSyncError, match=r"broadcast broke on rank|is the other side alive"):
                WeightReceiver(engine, transport).receive()


@pytest.mark.dist
def test_trainers_and_rollouts_in_processes_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "dead").mkdir()
    run_ranks(4, cases, str(tmp_path))
