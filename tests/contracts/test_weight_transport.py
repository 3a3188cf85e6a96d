"""What every weight transport must do. A new transport adds a pair to ``PAIRS`` and passes the same tests.

Both sides live in one process here, the sender in a thread; ``test_transports_dist.py`` has them in processes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.workers.rollout.helpers import (
    generate,
    make_engine,
    make_model,
    random_prompts,
    reference_logits,
    weights_of,
)
from verl.errors import RolloutError, WeightSyncError
from verl.workers.rollout.types import SamplingParams
from verl.workers.sharding_manager import Transport, WeightReceiver, WeightSender
from verl.workers.sharding_manager.transports.base import Unpacker
from verl.workers.sharding_manager.transports.broadcast import BroadcastTransport, transfer_group
from verl.workers.sharding_manager.transports.colocated import ColocatedTransport, SharedMemoryTransport
from verl.workers.sharding_manager.transports.disk import DiskTransport

BUCKET = 1 << 12
Pair = tuple[Transport, list[Transport]]


def colocated_pair(tmp_path: Path) -> Pair:
    both = ColocatedTransport(BUCKET)
    return both, [both]


def shared_memory_pair(tmp_path: Path) -> Pair:
    store = dist.HashStore()
    sender = SharedMemoryTransport(store, receivers=2, bucket_bytes=BUCKET, timeout_s=5)
    return sender, [SharedMemoryTransport(store, receivers=2, receiver=n, timeout_s=5) for n in range(2)]


def broadcast_pair(tmp_path: Path) -> Pair:
    store = dist.HashStore()
    with ThreadPoolExecutor(3) as pool:
        groups = list(pool.map(lambda rank: transfer_group(store, rank, 3, timeout_s=5), range(3)))
    sender, *receivers = (BroadcastTransport(group, bucket_bytes=BUCKET) for group in groups)
    return sender, list(receivers)


def disk_pair(tmp_path: Path) -> Pair:
    return (
        DiskTransport(tmp_path / "weights", bucket_bytes=BUCKET),
        [DiskTransport(tmp_path / "weights", bucket_bytes=1, timeout_s=5) for _ in range(2)],
    )


PAIRS: dict[str, Callable[[Path], Pair]] = {
    "broadcast": broadcast_pair,
    "colocated": colocated_pair,
    "disk": disk_pair,
    "shared_memory": shared_memory_pair,
}


@pytest.fixture(params=sorted(PAIRS))
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    sender, receivers = PAIRS[request.param](tmp_path)
    yield sender, receivers
    with pytest.raises(ZeroDivisionError), sender:  # leaves without waiting for anybody
        raise ZeroDivisionError


def in_thread(action: Callable[[], object]) -> Future:
    future: Future = Future()

    def run() -> None:
        try:
            future.set_result(action())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def take(receiver: Transport, newer_than: int = -1) -> tuple[int, list[list[tuple[str, torch.Tensor]]]]:
    """All buckets of the next version, copied."""
    delivery = receiver.receive(newer_than=newer_than)
    return delivery.version, [[(name, tensor.clone()) for name, tensor in bucket] for bucket in delivery.buckets]


def exchange(
    pair: Pair, version: int, weights: Iterable[tuple[str, torch.Tensor]], newer_than: int = -1
) -> list[tuple[int, list[list[tuple[str, torch.Tensor]]]]]:
    """What each receiver got."""
    sender, receivers = pair
    if sender in receivers:  # one process, one thread: the receiver draws what the sender only remembers
        sender.send(version, weights)
        return [take(sender, newer_than)]
    sending = in_thread(lambda: sender.send(version, weights))
    taking = [in_thread(lambda receiver=receiver: take(receiver, newer_than)) for receiver in receivers]
    results = [future.result(20) for future in taking]
    sending.result(20)
    return results


def odd_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(40, 30, generator=generator)
    return {
        "bf16": torch.randn(33, 7, generator=generator).bfloat16(),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 4),
        "int8": torch.arange(-5, 6, dtype=torch.int8),
        "too large for a bucket": torch.randn(3000, generator=generator),
        "after it": torch.tensor([float("nan"), float("inf"), -0.0], dtype=torch.float64),
        "transposed": wide[:20].T,
        "large, every other column": wide.repeat(3, 1)[:, ::2],
        "bool": torch.tensor([True, False, True]),
        "parameter": torch.nn.Parameter(torch.ones(2, 3)),
        "same memory": wide[:20],
    }


def assert_same(buckets: list[list[tuple[str, torch.Tensor]]], want: dict[str, torch.Tensor]) -> None:
    got = [item for bucket in buckets for item in bucket]
    assert [name for name, _ in got] == list(want)
    for name, tensor in got:
        expected = want[name].detach()
        assert (tensor.dtype, tensor.shape) == (expected.dtype, expected.shape), name
        assert torch.equal(bits(tensor), bits(expected)), name


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def test_every_transport_is_tested_here() -> None:
    assert {name.replace("_", "") + "transport" for name in PAIRS} == {
        cls.__name__.lower() for cls in Transport.__subclasses__()
    }


@pytest.mark.parametrize("check", ["0", "1"])
def test_tensors_of_all_kinds_arrive_bit_for_bit(pair: Pair, check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_SYNC_CHECK", check)
    tensors = odd_tensors()
    for version, buckets in exchange(pair, 3, tensors.items()):
        assert version == 3
        assert_same(buckets, tensors)
        sizes = [sum(tensor.nbytes for _, tensor in bucket) for bucket in buckets if len(bucket) > 1]
        assert all(size <= BUCKET + 12000 for size in sizes), "a bucket and at most the large tensor that ended in it"


def test_versions_follow_each_other(pair: Pair) -> None:
    for version in (0, 1, 5):
        tensors = {"w": torch.full((9,), float(version)), "v": torch.arange(version + 1)}
        for got, buckets in exchange(pair, version, tensors.items(), newer_than=version - 1):
            assert got == version
            assert_same(buckets, tensors)


def test_versions_must_increase(pair: Pair) -> None:
    exchange(pair, 4, {"w": torch.ones(1)}.items())
    sender, _ = pair
    for version in (4, 3):
        with pytest.raises(WeightSyncError, match=f"version {version} were offered, but version 4"):
            sender.send(version, {"w": torch.ones(1)}.items())
    assert len(exchange(pair, 5, {"w": torch.ones(1)}.items())) >= 1  # a refusal breaks nothing


def test_a_version_that_the_receiver_has_is_refused(pair: Pair) -> None:
    sender, receivers = pair
    if isinstance(sender, DiskTransport):
        sender.send(4, {"w": torch.ones(1)}.items())
        receivers[0].timeout_s = 0.1  # type: ignore[attr-defined]
        with pytest.raises(WeightSyncError, match=r"waited 0.1 s for weights newer than version 4 .* has version 4"):
            receivers[0].receive(newer_than=4)
        return
    with pytest.raises(WeightSyncError, match="version 4 were offered, but version 7"):
        exchange(pair, 4, {"w": torch.ones(1)}.items(), newer_than=7)


def test_no_tensors_are_a_version_too(pair: Pair) -> None:
    for version, buckets in exchange(pair, 0, []):
        assert (version, buckets) == (0, [])


def test_a_sender_that_fails_is_an_error_for_the_receiver(pair: Pair) -> None:
    sender, receivers = pair

    def failing() -> Iterator[tuple[str, torch.Tensor]]:
        yield "w", torch.ones(BUCKET)
        raise ConnectionError("a peer is gone")

    if isinstance(sender, DiskTransport):  # nothing appears
        with pytest.raises(ConnectionError, match="a peer is gone"):
            sender.send(1, failing())
        assert [path.name for path in sender.directory.iterdir()] == []
    elif sender in receivers:  # the same call stack
        sender.send(1, failing())
        with pytest.raises(ConnectionError, match="a peer is gone"):
            take(sender)
    else:
        sending = in_thread(lambda: sender.send(1, failing()))
        taking = [in_thread(lambda receiver=receiver: take(receiver)) for receiver in receivers]
        for future in taking:
            with pytest.raises(WeightSyncError, match=r"failed half way \(ConnectionError: a peer is gone\)"):
                future.result(20)
        with pytest.raises(ConnectionError):
            sending.result(20)
    tensors = {"w": torch.ones(3)}
    for _, buckets in exchange(pair, 2, tensors.items()):  # the next version is whole again
        assert_same(buckets, tensors)


def test_a_receiver_that_gives_up_does_not_stop_the_others(pair: Pair) -> None:
    sender, receivers = pair
    tensors = {f"w{number}": torch.full((BUCKET // 8,), float(number)) for number in range(12)}
    if sender in receivers:
        pytest.skip("there is no other side")
    sending = in_thread(lambda: sender.send(1, tensors.items()))

    def leave() -> None:
        delivery = receivers[0].receive()
        next(delivery.buckets)
        delivery.buckets.close()

    leaving, staying = in_thread(leave), in_thread(lambda: take(receivers[1]))
    leaving.result(20)
    assert_same(staying.result(20)[1], tensors)
    sending.result(20)
    for version, buckets in exchange(pair, 2, tensors.items(), newer_than=1):
        assert version == 2
        assert_same(buckets, tensors)


def test_a_tensor_that_changes_on_the_way_is_found(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_SYNC_CHECK", "1")
    sender, receivers = pair
    tensors = {"fine": torch.ones(9), "broken": torch.ones(9)}
    if sender in receivers:
        pytest.skip("the tensors themselves arrive")
    if isinstance(sender, DiskTransport):
        sender.send(1, tensors.items())
        file = sender.directory / "version-00000001" / "model-00001.safetensors"
        raw = bytearray(file.read_bytes())
        raw[-36] ^= 1  # files hold tensors in order of name here: "broken" comes first, "fine" last
        file.write_bytes(raw)
        with pytest.raises(WeightSyncError, match=r"'fine' in .* is not what was written"):
            take(receivers[0])
        return
    original = Unpacker.take

    def corrupted(self: Unpacker, message: object, buffer: torch.Tensor) -> object:
        copy = buffer.clone()
        copy[64] ^= 1  # the second tensor begins at the next multiple of 64
        return original(self, message, copy)  # type: ignore[arg-type]

    monkeypatch.setattr(Unpacker, "take", corrupted)
    with pytest.raises(WeightSyncError, match=r"'broken' changed on its way: digest \w{32} instead of \w{32}"):
        exchange(pair, 1, tensors.items())


def test_waiting_has_an_end(tmp_path: Path) -> None:
    store = dist.HashStore()
    alone = SharedMemoryTransport(store, receiver=0, timeout_s=0.2)
    with pytest.raises(WeightSyncError, match=r"waited 0 s for weights newer than version 3.*other side alive"):
        alone.receive(newer_than=3)
    unread = SharedMemoryTransport(dist.HashStore(), bucket_bytes=64, timeout_s=0.2)
    with pytest.raises(WeightSyncError, match="waited 0 s for a receiver to read bucket 0"):
        unread.send(1, {str(number): torch.ones(16) for number in range(4)}.items())
    with pytest.raises(WeightSyncError, match=r"waited 0.1 s for weights newer than version -1 .* has nothing"):
        DiskTransport(tmp_path, timeout_s=0.1).receive()
    with pytest.raises(WeightSyncError, match="no weights were sent"):
        ColocatedTransport().receive()


class Source:
    """A training side that gathers each tensor."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    def local_tensors(self) -> dict[str, torch.Tensor] | None:
        return None

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights_of(self.model).items():
            yield name, tensor.detach().clone()


@pytest.mark.parametrize("check", ["0", "1"])
def test_a_rollout_engine_generates_with_the_weights_that_arrive(
    pair: Pair, check: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VERL_SYNC_CHECK", check)
    sender, receivers = pair
    prompt = random_prompts([7])[0]
    model = make_model("qwen2", seed=1)
    engines = [make_engine(model, tmp_path / str(number)) for number in range(len(receivers))]
    sinks = [WeightReceiver(engine, receiver) for engine, receiver in zip(engines, receivers, strict=True)]
    for version, seed in ((1, 1), (2, 5)):
        model = make_model("qwen2", seed=seed)
        side = WeightSender(Source(model), sender)
        if sender in receivers:
            side.send(version)
            reports = [sinks[0].receive()]
        else:
            sending = in_thread(lambda side=side, version=version: side.send(version))
            waiting = [in_thread(sink.receive) for sink in sinks]
            reports = [future.result(20) for future in waiting]
            sent = sending.result(20)
            assert sent.bytes_sent == sum(tensor.nbytes for tensor in weights_of(model).values())
            assert sent.tensors == len(weights_of(model))
        for engine, report in zip(engines, reports, strict=True):
            assert report.version == engine.policy_version == version
            assert report.tensors == len(weights_of(model))
            completion = generate(engine, [prompt], SamplingParams(4, seed=1, ignore_eos=True))[0]
            logits = reference_logits(model, prompt, completion.token_ids)
            expected = logits.log_softmax(-1)[torch.arange(4), torch.tensor(completion.token_ids)]
            torch.testing.assert_close(torch.tensor(completion.log_probs), expected, atol=1e-5, rtol=0)


def test_an_engine_that_refuses_a_weight_lets_the_sender_go_on(pair: Pair, tmp_path: Path) -> None:
    sender, receivers = pair
    model = make_model("qwen2")
    engine = make_engine(model, tmp_path)
    if sender in receivers:
        pytest.skip("there is no other side")
    wrong = {**weights_of(model), "model.norm.weight": torch.ones(3)}
    sending = in_thread(lambda: sender.send(1, wrong.items()))
    others = [in_thread(lambda receiver=receiver: take(receiver)) for receiver in receivers[1:]]
    with pytest.raises(WeightSyncError, match=r"'model.norm.weight' has shape \(3,\)"):
        WeightReceiver(engine, receivers[0]).receive()
    sending.result(20)
    for other in others:
        other.result(20)
    with pytest.raises(RolloutError, match="no complete weights"):
        generate(engine, [[3]], SamplingParams(1))
