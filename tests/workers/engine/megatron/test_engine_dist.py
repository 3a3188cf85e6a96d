"""Megatron-core on 2 and 4 gloo ranks: the numbers of plain Transformers, however the model is divided.

Starting a process with Megatron-core takes longer than the checks, so each group of processes runs many.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.fixtures.tiny import make_tiny_model_dir
from tests.models.families import make_config
from tests.workers.engine.ranks import run_ranks
from tests.workers.engine.reference import (
    LOG_PROBS,
    POLICY,
    TEMPERATURE,
    VALUES,
    policy_batch,
    policy_loss,
    run_reference,
    value_loss,
)
from tests.workers.engine.reference import make_engine as make_fsdp_engine
from verl.errors import CheckpointError, ConfigError, DataError
from verl.utils.metrics import MetricSet
from verl.workers.engine.base import MicroBatching

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="Megatron-core is not installed"),
]

WHOLE = MicroBatching()
MICROS = [WHOLE, MicroBatching(size=4), MicroBatching(size=2), MicroBatching(max_tokens=40)]
DENSE = ("llama", "qwen3", "gemma", "gemma2", "gemma3_text", "mistral", "qwen2_sliding")
LOCAL = ("gemma2", "gemma3_text")  # layers differ, which stages have to know
EXPERTS = ("qwen3_moe", "deepseek_v2", "deepseek_v3")
SQUARES = frozenset({"log_probs", "sum_pi_squared"})
TRAINED = frozenset({"model", "optimizer", "extra"})
SCORES = frozenset({"scores"})


# ---- the reference of a family, by plain Transformers -----------------------------------------------------------


def family_reference(family: str, directory: Path) -> None:
    """Save a tiny model of the family, and what one update of it should look like."""
    torch.manual_seed(3)
    made = AutoModelForCausalLM.from_config(make_config(family))
    for name, tensor in (*made.named_parameters(), *made.named_buffers()):
        if "norm" in name or "e_score" in name:  # which all start alike
            tensor.data += 0.1 * torch.randn_like(tensor)
    made.save_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    batch = policy_batch(vocab=60)
    mask, width = batch["response_mask"].bool(), batch["response_mask"].shape[1]
    rows = []
    for i in range(len(mask)):
        real = batch["attention_mask"][i].bool()
        ids = batch["input_ids"][i][real][None]
        n = int(real[-width:].sum())
        log_p = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0, -n - 1 : -1], -1)
        both = torch.stack([log_p.gather(1, ids[0, -n:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)])
        rows.append(torch.nn.functional.pad(both, (0, width - n)))
    zero = torch.zeros(())
    log_probs, entropys = torch.where(mask, torch.stack(rows, 1), zero)
    loss = torch.where(mask, -log_probs * batch["advantages"] - 0.1 * entropys, zero).sum() / mask.sum()
    loss.backward()
    parameters = dict(model.named_parameters())
    stored = {name: buffer for name, buffer in model.named_buffers() if "e_score" in name}
    torch.save(
        {
            "log_probs": log_probs.detach(),
            "loss": float(loss.detach()),
            "weights": {name: p.detach() for name, p in parameters.items()} | stored,
            "gradients": {
                name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in (parameters | stored).items()
            },
            "grad_norm": float(torch.nn.utils.clip_grad_norm_(parameters.values(), 1e9)),
        },
        directory / "reference.pt",
    )


def check_family(directory: Path, **options: Any) -> None:
    """Weights, log-probs, loss, gradients and gradient norm of one update."""
    from tests.workers.engine.megatron import ranks as ours

    reference = torch.load(directory / "reference.pt")
    # unclipped, and reduced whole on every rank, so that gradients can be read afterwards
    engine = ours.make_megatron_engine(
        str(directory), optim={"clip_grad": 0.0}, use_distributed_optimizer=False, **options
    )
    what = f"{directory.name} {options}"
    ours.assert_close(ours.parameters(engine), reference["weights"], 0.0, what)
    layout = engine.layout
    batch = policy_batch(vocab=60)
    mine = ours.rows_of(batch, layout.dp_rank, layout.dp_size)
    want = ours.rows_of({**batch, "log_probs": reference["log_probs"]}, layout.dp_rank, layout.dp_size)
    out = engine.forward(mine, LOG_PROBS, micro=MicroBatching(size=3))
    torch.testing.assert_close(out["log_probs"], want["log_probs"], rtol=1e-5, atol=5e-6)
    metrics = engine.train_batch(mine, policy_loss, want=POLICY, micro=MicroBatching(size=3)).values_by_name()
    assert (what, metrics["loss"]) == (what, pytest.approx(reference["loss"], rel=1e-5))
    assert (what, metrics["grad_norm"]) == (what, pytest.approx(reference["grad_norm"], rel=1e-5))
    ours.assert_close(ours.gradients(engine), reference["gradients"], 2e-6, what)


# ---- two ranks --------------------------------------------------------------------------------------------------


def two_ranks(rank: int, model_dir: str, work: str) -> None:
    from tests.workers.engine.megatron import ranks as ours
    from verl.workers.engine.megatron.parallel import leave_parallel_groups

    reference = torch.load(f"{work}/reference.pt")
    engine = ours.check_layout(model_dir, reference, MICROS, tp=2)
    assert engine.local_tensors() is None
    assert (engine.layout.dp_size, engine.layout.tp_size, engine.layout.is_output_rank) == (1, 2, rank == 0)
    embedding = engine.bridge.local["embedding.word_embeddings.weight"]
    assert embedding.shape[0] == 56  # 104 tokens, padded to 112

    with pytest.raises(ConfigError, match="share their parallel sizes"):
        ours.make_megatron_engine(model_dir, pp=2)
    with pytest.raises(ConfigError, match="values"):
        engine.forward(policy_batch(), VALUES, micro=WHOLE)

    fields = engine.forward(policy_batch(), SQUARES, micro=MicroBatching(size=3))
    torch.testing.assert_close(fields, torch.load(f"{work}/squares.pt"), rtol=1e-5, atol=5e-6)

    def broken(outputs: Any, rows: Any, info: Any) -> tuple[Tensor, MetricSet]:
        return outputs["log_probs"].sum() * float("nan"), MetricSet()

    before = ours.parameters(engine)
    metrics = engine.train_batch(policy_batch(), broken, want=LOG_PROBS, micro=WHOLE).values_by_name()
    assert metrics["skipped_steps"] == 1
    ours.assert_close(ours.parameters(engine), before, 0.0, "a step that was skipped")
    evaluated = ours.make_megatron_engine(model_dir, tp=2, trained=False)
    torch.testing.assert_close(
        evaluated.forward(policy_batch(), LOG_PROBS, micro=WHOLE, temperature=0.8)["log_probs"],
        reference["log_probs"],
        rtol=1e-5,
        atol=5e-6,
    )

    # a resumed run continues bit for bit
    saved = Path(work) / "saved"
    engine.save(saved, TRAINED | {"hf_model"})
    before = ours.parameters(engine)
    if rank == 0:
        exported = AutoModelForCausalLM.from_pretrained(saved / "huggingface", dtype=torch.float32)
        ours.assert_close({n: p.detach() for n, p in exported.named_parameters()}, before, 0.0, "exported")
    dist.barrier()
    again = ours.make_megatron_engine(model_dir, tp=2)
    again.load(saved, TRAINED)
    assert (again.step, again.lr_step) == (engine.step, engine.lr_step)
    numbers = [continue_training(one) for one in (engine, again)]
    assert numbers[0] == numbers[1]
    continued = ours.parameters(engine)
    ours.assert_close(ours.parameters(again), continued, 0.0, "resumed")
    with pytest.raises(CheckpointError, match="use_distributed_optimizer=True"):
        ours.make_megatron_engine(model_dir, tp=2, use_distributed_optimizer=False).load(saved, TRAINED)
    with pytest.raises(CheckpointError, match="no checkpoint directory"):
        engine.load(f"{work}/nothing" if rank else saved, TRAINED)
    dist.barrier()

    ours.check_layout(model_dir, reference, MICROS, tp=2, sequence_parallel=True, checkpointing=True)
    check_heads(model_dir, work, tp=2, sequence_parallel=True)
    for family in DENSE:
        check_family(Path(work) / family, tp=2)

    engine = ours.check_layout(model_dir, reference, MICROS, pp=2)
    staged = Path(work) / "staged"  # both stages have the embedding
    engine.save(staged, TRAINED)
    after, then = continue_training(engine), ours.parameters(engine)
    check_resumed(model_dir, staged, after, then, pp=2)
    check_heads(model_dir, work, pp=2)
    half = ours.make_megatron_engine(model_dir, pp=2, dtype="bfloat16")
    assert {tensor.dtype for _, tensor in half.named_tensors()} == {torch.bfloat16}
    metrics = half.train_batch(policy_batch(), policy_loss, want=POLICY, micro=WHOLE, temperature=0.8).values_by_name()
    assert metrics["grad_norm"] == pytest.approx(reference["grad_norm"][0], rel=0.05)

    for family in LOCAL:
        check_family(Path(work) / family, pp=2, checkpointing=True)
    check_resumed(model_dir, saved, numbers[0], continued, pp=2)
    started = ours.make_megatron_engine(
        model_dir, pp=2, use_dist_checkpointing=True, dist_checkpointing_path=str(saved)
    )
    ours.assert_close(ours.parameters(started), before, 0.0, "initial weights from a checkpoint")

    engine = ours.check_layout(model_dir, reference, MICROS)
    assert engine.layout.dp_size == 2
    check_resumed(model_dir, saved, numbers[0], continued)
    check_resumed(model_dir, staged, after, then)
    ours.check_layout(model_dir, reference, [MicroBatching(size=2)], use_distributed_optimizer=False)
    coupled = {"decoupled_weight_decay": False, "optimizer_cpu_offload": True}
    engine = ours.check_layout(
        model_dir, torch.load(f"{work}/coupled.pt"), [WHOLE], optim={"override_optimizer_config": coupled}
    )
    engine.save(Path(work) / "coupled", TRAINED)
    engine.load(Path(work) / "coupled", TRAINED)
    with pytest.raises(ConfigError, match="needs Transformer Engine"):
        ours.make_megatron_engine(
            model_dir, optim={"override_optimizer_config": {"use_precision_aware_optimizer": True}}
        )
    with pytest.raises(DataError):  # on one rank, told to both
        engine.forward(
            ours.rows_of(policy_batch(), rank, 2), LOG_PROBS, micro=MicroBatching(max_tokens=15 if rank else 8)
        )
    dist.barrier()

    ours.check_layout(model_dir, reference, MICROS, cp=2)
    check_heads(model_dir, work, cp=2)
    for family in LOCAL:
        check_family(Path(work) / family, cp=2)

    leave_parallel_groups()
    for family in EXPERTS:
        check_family(Path(work) / family, ep=2)
    leave_parallel_groups()
    for family in EXPERTS:
        check_family(Path(work) / family, pp=2)
    leave_parallel_groups()
    for family in EXPERTS:
        check_family(Path(work) / family, tp=2)


def continue_training(engine: Any) -> dict[str, float]:
    from tests.workers.engine.megatron.ranks import rows_of

    mine = rows_of(policy_batch(), engine.layout.dp_rank, engine.layout.dp_size)
    metrics = engine.train_batch(mine, policy_loss, want=POLICY, micro=MicroBatching(size=2))
    return metrics.values_by_name()


def check_resumed(
    model_dir: str, saved: Path, numbers: dict[str, float], weights: dict[str, Tensor], **options: Any
) -> None:
    """What was saved under other sizes continues alike."""
    from tests.workers.engine.megatron import ranks as ours

    engine = ours.make_megatron_engine(model_dir, **options)
    engine.load(saved, TRAINED)
    got = continue_training(engine)
    assert got["loss"] == pytest.approx(numbers["loss"], rel=1e-5)
    assert got["grad_norm"] == pytest.approx(numbers["grad_norm"], rel=1e-5)
    ours.assert_close(ours.parameters(engine), weights, 1e-4, f"resumed {options}")


def check_heads(model_dir: str, work: str, **options: Any) -> None:
    """A critic learns as on FSDP2, a reward model scores as in Transformers."""
    from tests.workers.engine.megatron import ranks as ours

    batch = policy_batch()
    critic = ours.make_megatron_engine(model_dir, head="value", **options)
    mine = ours.rows_of(batch, critic.layout.dp_rank, critic.layout.dp_size)
    losses = [
        critic.train_batch(mine, value_loss, want=VALUES, micro=MicroBatching(size=2)).values_by_name()["loss"]
        for _ in range(3)
    ]
    expected = torch.load(f"{work}/critic.pt")
    assert losses == pytest.approx(expected["losses"], rel=1e-5), options
    ours.assert_close(ours.parameters(critic), expected["weights"], 2e-4, f"critic {options}")
    judge = ours.make_megatron_engine(f"{work}/judge", head="classifier", trained=False, **options)
    scores = judge.forward(mine, SCORES, micro=MicroBatching(size=3))["scores"]
    torch.testing.assert_close(scores, torch.load(f"{work}/scores.pt"), rtol=1e-5, atol=1e-5)


def prepare(model_dir: str, work: Path) -> None:
    """Everything that the ranks compare with."""
    batch = policy_batch()
    torch.save(run_reference(model_dir, batch), work / "reference.pt")
    torch.save(run_reference(model_dir, batch, decoupled=False), work / "coupled.pt")
    plain = make_fsdp_engine(model_dir)
    for _ in range(2):  # as far as the engine that is compared with it
        plain.train_batch(batch, policy_loss, want=POLICY, micro=WHOLE, temperature=TEMPERATURE)
    torch.save(plain.forward(batch, SQUARES, micro=WHOLE), work / "squares.pt")
    critic = make_fsdp_engine(model_dir, head="value")
    losses = [
        critic.train_batch(batch, value_loss, want=VALUES, micro=WHOLE).values_by_name()["loss"] for _ in range(3)
    ]
    weights = {name: tensor.clone() for name, tensor in critic.named_tensors()}
    torch.save({"losses": losses, "weights": weights}, work / "critic.pt")
    torch.manual_seed(5)
    judge = AutoModelForSequenceClassification.from_pretrained(model_dir, num_labels=1, dtype=torch.float32)
    judge.save_pretrained(work / "judge")
    judge = make_fsdp_engine(str(work / "judge"), head="classifier", trained=False)
    torch.save(judge.forward(batch, SCORES, micro=WHOLE)["scores"], work / "scores.pt")


def test_two_ranks(tiny_model_dir: str, tmp_path: Path) -> None:
    prepare(tiny_model_dir, tmp_path)
    for family in (*DENSE, *EXPERTS):
        family_reference(family, tmp_path / family)
    run_ranks(2, two_ranks, tiny_model_dir, str(tmp_path))


# ---- four ranks -------------------------------------------------------------------------------------------------


def four_ranks(rank: int, model_dir: str, work: str) -> None:
    from tests.workers.engine.megatron import ranks as ours
    from verl.workers.engine.megatron.parallel import leave_parallel_groups

    reference = torch.load(f"{work}/reference.pt")
    ours.check_layout(model_dir, reference, MICROS, tp=2, pp=2)
    ours.check_layout(model_dir, reference, [WHOLE], tp=2, pp=2, sequence_parallel=True, checkpointing=True)
    ours.check_layout(model_dir, reference, MICROS, pp=2, checkpointing=True)  # and two data-parallel ranks
    ours.check_layout(model_dir, reference, MICROS, pp=2, vpp=2)
    ours.check_layout(model_dir, reference, [MicroBatching(size=2)], tp=2, cp=2, sequence_parallel=True)
    ours.check_layout(model_dir, reference, [MicroBatching(size=2)], pp=2, cp=2)
    ours.check_layout(model_dir, reference, [MicroBatching(size=2)], tp=4)  # more ranks than key-value heads
    ours.check_layout(
        model_dir,
        reference,
        [WHOLE],
        pp=2,
        override_transformer_config={"num_layers_in_first_pipeline_stage": 1},
    )
    leave_parallel_groups()
    for family in EXPERTS:
        check_family(Path(work) / family, tp=2, ep=2, etp=1, sequence_parallel=True)
    leave_parallel_groups()
    for family in EXPERTS:
        check_family(Path(work) / family, tp=2, ep=2, etp=2, sequence_parallel=True)
    leave_parallel_groups()
    for family in EXPERTS:
        check_family(Path(work) / family, pp=2, ep=2)


@pytest.mark.slow
def test_four_ranks(tmp_path: Path) -> None:
    model_dir = make_tiny_model_dir(tmp_path / "model", layers=4)
    torch.save(run_reference(model_dir, policy_batch()), tmp_path / "reference.pt")
    for family in EXPERTS:
        family_reference(family, tmp_path / family)
    run_ranks(4, four_ranks, model_dir, str(tmp_path))
