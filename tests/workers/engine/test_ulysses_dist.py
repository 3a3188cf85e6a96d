"""Sequence parallelism on 2 and 4 gloo ranks: the numbers of one rank, whoever holds which tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.models.families import make_batch, make_config
from tests.models.family_checks import save_model
from tests.models.images import image_batch
from tests.workers.engine.ranks import run_ranks
from tests.workers.engine.reference import (
    POLICY,
    TEMPERATURE,
    VALUES,
    make_engine,
    policy_batch,
    policy_loss,
    run_reference,
    value_loss,
)
from verl.errors import ConfigError, DataError
from verl.utils.metrics import MetricSet
from verl.workers.engine.base import MicroBatching
from verl.workers.engine.fsdp.engine import FSDPEngine

pytestmark = pytest.mark.dist

WHOLE = MicroBatching()
SCORES = frozenset({"scores"})
#: what differs between families around attention: grouped heads, sliding windows, soft caps, a narrower value, experts
FAMILIES = ("qwen2_sliding", "gemma2", "deepseek_v3", "qwen3_moe")


def rows(batch: dict[str, Tensor], lo: int, hi: int) -> dict[str, Tensor]:
    return {name: value[lo:hi] for name, value in batch.items()}


def check(
    model_dir: str,
    reference: dict[str, Any],
    size: int,
    bounds: list[tuple[int, int]],
    micro: MicroBatching,
    **options: Any,
) -> FSDPEngine:
    """Forward and two steps on the rows of this rank's group give the whole batch's reference numbers."""
    fsdp = {"ulysses_sequence_parallel_size": size, **options.pop("fsdp", {})}
    engine = make_engine(model_dir, fsdp=fsdp, **options)
    layout, rank = engine.layout, dist.get_rank()
    assert (layout.sp_rank, layout.sp_size) == (rank % size, size)
    assert (layout.dp_rank, layout.dp_size) == (rank // size, dist.get_world_size() // size)
    assert layout.is_output_rank == (rank % size == 0)
    lo, hi = bounds[layout.dp_rank]
    mine = rows(policy_batch(), lo, hi)
    out = engine.forward(mine, POLICY, micro=micro, temperature=TEMPERATURE)
    for name in POLICY:
        torch.testing.assert_close(out[name], reference[name][lo:hi], rtol=1e-6, atol=2e-6)
    for step in range(2):
        metrics = engine.train_batch(mine, policy_loss, want=POLICY, micro=micro, temperature=TEMPERATURE)
        values = metrics.values_by_name()
        assert values["loss"] == pytest.approx(reference["loss"][step], rel=1e-5, abs=1e-6)
        assert values["grad_norm"] == pytest.approx(reference["grad_norm"][step], rel=1e-5)
        seen: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(seen, values)
        assert all(other == values for other in seen)
        for name, tensor in engine.named_tensors():
            torch.testing.assert_close(tensor, reference["params"][step][name], rtol=0, atol=2e-4)
    return engine


def images_on(rank: int, model_dir: str, work: str) -> None:
    """Images whose features lie on one rank, on both, and rows without any."""
    reference = torch.load(f"{work}/images.pt")
    engine = make_engine(model_dir, fsdp={"ulysses_sequence_parallel_size": 2}, checkpointing=True)
    share = 6 // engine.layout.dp_size
    lo = engine.layout.dp_rank * share
    mine = image_batch()[0][lo : lo + share]
    for micro in (WHOLE, MicroBatching(size=1)):
        out = engine.forward(mine, POLICY, micro=micro, temperature=TEMPERATURE)
        for name in POLICY:
            torch.testing.assert_close(out[name], reference[name][lo : lo + share], rtol=1e-5, atol=1e-5)
    values = engine.train_batch(mine, policy_loss, want=POLICY, micro=WHOLE, temperature=TEMPERATURE).values_by_name()
    assert values["loss"] == pytest.approx(reference["loss"][0], rel=1e-5, abs=1e-6)
    assert values["grad_norm"] == pytest.approx(reference["grad_norm"][0], rel=1e-5)


@pytest.mark.parametrize("world", [2, 4])
def test_rows_with_images(world: int, tmp_path: Path) -> None:
    model_dir = save_model("qwen2_5_vl", tmp_path / "model")
    batch, images = image_batch()
    torch.save(run_reference(model_dir, dict(batch.items()), steps=1, images=images), tmp_path / "images.pt")
    run_ranks(world, images_on, model_dir, str(tmp_path))


def two_ranks(rank: int, model_dir: str, work: str) -> None:
    reference = torch.load(f"{work}/reference.pt")
    everything = [(0, 8)]
    check(model_dir, reference, 2, everything, WHOLE)
    check(model_dir, reference, 2, everything, MicroBatching(size=3), checkpointing=True)
    engine = check(
        model_dir, reference, 2, everything, MicroBatching(max_tokens=12)
    )  # 24 in a micro-batch of two ranks
    engine.share_prompts = False
    engine.forward(policy_batch(), POLICY, micro=MicroBatching(max_tokens=8))
    with pytest.raises(DataError):  # two ranks of 7 do not hold the longest row, of 15
        engine.forward(policy_batch(), POLICY, micro=MicroBatching(max_tokens=7))

    # rows without a response, and none at all: every rank takes part in what is collective
    silent = policy_batch()
    silent["response_mask"] = torch.zeros_like(silent["response_mask"])
    for batch in (silent, rows(silent, 0, 0)):
        assert not engine.forward(batch, POLICY, micro=WHOLE)["log_probs"].any()
        assert engine.train_batch(batch, zero_loss, want=POLICY, micro=WHOLE)["grad_norm"].value == 0
    # one token on one rank, padding alone on the other
    short = make_batch([1], [1], vocab=100)
    assert engine.forward(short, POLICY, micro=WHOLE)["entropys"].sum() > 0

    half = make_engine(model_dir, compute="bfloat16", fsdp={"ulysses_sequence_parallel_size": 2})
    out = half.forward(policy_batch(), POLICY, micro=WHOLE, temperature=TEMPERATURE)
    torch.testing.assert_close(out["log_probs"], reference["log_probs"], rtol=0.02, atol=0.05)
    metrics = half.train_batch(policy_batch(), policy_loss, want=POLICY, micro=WHOLE, temperature=TEMPERATURE)
    assert metrics["grad_norm"].value == pytest.approx(reference["grad_norm"][0], rel=0.05)

    critic = make_engine(model_dir, head="value", fsdp={"ulysses_sequence_parallel_size": 2})
    losses = [critic.train_batch(policy_batch(), value_loss, want=VALUES, micro=WHOLE)["loss"].value for _ in range(3)]
    assert losses == pytest.approx(torch.load(f"{work}/critic.pt"), rel=1e-5)
    judge = make_engine(f"{work}/judge", head="classifier", trained=False, fsdp={"ulysses_sequence_parallel_size": 2})
    scores = judge.forward(policy_batch(), SCORES, micro=MicroBatching(size=3))["scores"]
    torch.testing.assert_close(scores, torch.load(f"{work}/scores.pt"), rtol=1e-5, atol=1e-6)

    for family in FAMILIES:
        shared = make_engine(f"{work}/{family}", fsdp={"ulysses_sequence_parallel_size": 2})
        want = torch.load(f"{work}/{family}.pt")
        batch = family_batch()
        out = shared.forward(batch, POLICY, micro=WHOLE)
        torch.testing.assert_close(out["log_probs"], want["log_probs"], rtol=1e-5, atol=3e-6)
        got = shared.train_batch(batch, policy_loss, want=POLICY, micro=WHOLE).values_by_name()
        assert got["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-5), family
        assert got["loss"] == pytest.approx(want["loss"], rel=1e-5), family

    for options, text in (
        ({"packed": False}, "use_remove_padding=true"),
        ({"fsdp": {"ulysses_sequence_parallel_size": 3}}, "does not divide the 2 ranks"),
    ):
        with pytest.raises(ConfigError, match=text):
            make_engine(model_dir, **{"fsdp": {"ulysses_sequence_parallel_size": 2}, **options})
    with pytest.raises(ConfigError, match="must divide the model's 3 attention heads; use one of 1, 3"):
        make_engine(f"{work}/three_heads", fsdp={"ulysses_sequence_parallel_size": 2})


def four_ranks(rank: int, model_dir: str, work: str) -> None:
    reference = torch.load(f"{work}/reference.pt")
    # more ranks than key heads
    check(model_dir, reference, 4, [(0, 8)], MicroBatching(size=3))
    check(model_dir, reference, 2, [(0, 3), (3, 8)], MicroBatching(size=2), fsdp={"fsdp_size": 2})
    check(model_dir, reference, 2, [(0, 8), (8, 8)], MicroBatching(max_tokens=14), checkpointing=True)


def zero_loss(outputs: Any, rows: Any, info: Any) -> Any:
    return sum(value.sum() for value in outputs.values()), MetricSet()


def family_batch() -> dict[str, Tensor]:
    batch = make_batch([2, 6, 6, 9], [4, 5, 7, 3])
    generator = torch.Generator().manual_seed(3)
    batch["advantages"] = torch.randn(batch["response_mask"].shape, generator=generator)
    return batch


def test_two_and_four_ranks(tiny_model_dir: str, tmp_path: Path) -> None:
    batch = policy_batch()
    torch.save(run_reference(tiny_model_dir, batch), tmp_path / "reference.pt")
    critic = make_engine(tiny_model_dir, head="value")
    losses = [critic.train_batch(batch, value_loss, want=VALUES, micro=WHOLE)["loss"].value for _ in range(3)]
    torch.save(losses, tmp_path / "critic.pt")

    torch.manual_seed(5)
    config = make_config("llama", vocab_size=104, num_labels=1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "judge")
    judge = make_engine(str(tmp_path / "judge"), head="classifier", trained=False)
    torch.save(judge.forward(batch, SCORES, micro=WHOLE)["scores"], tmp_path / "scores.pt")

    three = make_config("llama", num_attention_heads=3, num_key_value_heads=3, hidden_size=48)
    AutoModelForCausalLM.from_config(three).save_pretrained(tmp_path / "three_heads")
    for family in FAMILIES:
        torch.manual_seed(4)
        AutoModelForCausalLM.from_config(make_config(family)).save_pretrained(tmp_path / family)
        alone = make_engine(str(tmp_path / family))
        want: dict[str, Any] = dict(alone.forward(family_batch(), POLICY, micro=WHOLE))
        want |= alone.train_batch(family_batch(), policy_loss, want=POLICY, micro=WHOLE).values_by_name()
        torch.save(want, tmp_path / f"{family}.pt")

    run_ranks(2, two_ranks, tiny_model_dir, str(tmp_path))
    run_ranks(4, four_ranks, tiny_model_dir, str(tmp_path))
