"""The independent reference of the engine tests: plain Transformers, torch's AdamW and clipping, one row at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

import torch
from tensordict import TensorDict
from torch import Tensor
from transformers import AutoConfig

from tests.models.families import make_batch
from tests.models.images import Inputs, model_arguments
from verl.config import CheckpointConfig, FSDPConfig, ModelConfig, OptimConfig
from verl.models.loading import language_model_class
from verl.models.lora import is_adapter_name, merged
from verl.utils.metrics import MetricSet, mmax, mmean, msum
from verl.workers.engine.base import GlobalBatchInfo, TrainEngine, WeightForm
from verl.workers.engine.fsdp.engine import FSDPEngine

LOG_PROBS = frozenset({"log_probs"})
POLICY = frozenset({"log_probs", "entropys"})
VALUES = frozenset({"values"})
TEMPERATURE = 0.8
LR, WEIGHT_DECAY, CLIP, BETAS, EPS = 1e-2, 0.1, 0.5, (0.9, 0.95), 1e-8


def policy_batch(seed: int = 0, vocab: int = 100) -> dict[str, Tensor]:
    """Eight ragged rows, pairs with equal prompts, NaN advantages where no token counts."""
    batch = make_batch(
        [5, 5, 9, 9, 3, 3, 7, 7],
        [3, 7, 1, 6, 2, 9, 4, 4],
        equal_prompts_of=2,
        vocab=vocab,
        prompt_width=11,
        response_width=10,
        seed=seed,
    )
    mask = batch["response_mask"]
    mask[5, 2:4] = 0  # a tool's output in the middle of a response
    generator = torch.Generator().manual_seed(seed + 1)
    weights = torch.randn(mask.shape, generator=generator)
    batch["advantages"] = torch.where(mask.bool(), weights, torch.tensor(float("nan")))
    return batch


def policy_loss(outputs: Mapping[str, Tensor], rows: TensorDict, info: GlobalBatchInfo) -> tuple[Tensor, MetricSet]:
    """Policy gradient with an entropy bonus, normalised by the tokens of the whole mini-batch."""
    mask = rows["response_mask"].bool()
    per_token = -outputs["log_probs"] * rows["advantages"] - 0.1 * outputs["entropys"]
    total = torch.where(mask, per_token, torch.zeros(())).sum() / info.batch_num_tokens
    picked = outputs["log_probs"].detach()[mask]
    metrics = MetricSet(
        {
            "loss": msum(float(total.detach())),
            "log_prob": mmean(float(picked.sum()), len(picked)),
            "log_prob/max": mmax(float(picked.max()) if len(picked) else float("-inf")),
        }
    )
    return total * info.dp_size, metrics


def value_loss(outputs: Mapping[str, Tensor], rows: TensorDict, info: GlobalBatchInfo) -> tuple[Tensor, MetricSet]:
    """Squared error to the advantages as targets."""
    mask = rows["response_mask"].bool()
    error = torch.where(mask, outputs["values"] - rows["advantages"], torch.zeros(()))
    total = error.square().sum() / info.batch_num_tokens
    return total * info.dp_size, MetricSet({"loss": msum(float(total.detach()))})


def make_engine(
    path: str,
    *,
    head: str = "lm",
    packed: bool = True,
    checkpointing: bool = False,
    trained: bool = True,
    optim: dict[str, Any] | None = None,
    fsdp: dict[str, Any] | None = None,
    compute: str = "float32",
    model: dict[str, Any] | None = None,
    strict: bool = True,
    placement: Any = None,
) -> FSDPEngine:
    """A built engine on CPU."""
    fsdp_config = FSDPConfig(**(fsdp or {}))
    fsdp_config.mixed_precision.param_dtype = compute
    optim_config = OptimConfig(
        **{
            "lr": LR,
            "weight_decay": WEIGHT_DECAY,
            "clip_grad": CLIP,
            "betas": list(BETAS),
            "eps": EPS,
            **(optim or {}),
        }
    )
    engine = FSDPEngine(
        ModelConfig(path=path, use_remove_padding=packed, enable_gradient_checkpointing=checkpointing, **(model or {})),
        fsdp_config,
        optim_config if trained else None,
        head=head,
        device="cpu",
        checkpoint_config=CheckpointConfig(strict=strict),
        shard_placement=placement,
    )
    engine.build()
    return engine


def check_forms(engine: TrainEngine, scaling: float) -> None:
    """What an engine with adapters sends: merged, apart and the adapters alone are the same policy."""
    merged_form, apart, alone = (
        {name: tensor.clone() for name, tensor in engine.named_tensors(form)} for form in get_args(WeightForm)
    )
    assert alone.keys() == {name for name in apart if is_adapter_name(name)}
    assert merged_form.keys() == apart.keys() - alone.keys()
    assert all(torch.equal(tensor, apart[name]) for name, tensor in alone.items())
    changed = set()
    for name, tensor in merged_form.items():
        layer, expected = name.removesuffix(".weight"), apart[name]
        if f"{layer}.lora_A" in alone:
            expected = merged(expected, alone[f"{layer}.lora_A"], alone[f"{layer}.lora_B"], scaling)
            changed.add(layer)
        assert torch.equal(tensor, expected), name
    assert {name.rpartition(".")[0] for name in alone} == changed


def run_reference(
    path: str,
    batch: dict[str, Tensor],
    steps: int = 2,
    images: list[Inputs | None] | None = None,
    *,
    decoupled: bool = True,
) -> dict[str, Any]:
    """Forward numbers, then ``steps`` updates: losses, gradient norms, and the parameters after each.

    With ``decoupled=False`` the weight decay is a part of the gradient (Adam rather than AdamW).
    """
    model_class = language_model_class(AutoConfig.from_pretrained(path))
    model = model_class.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    optimizer = kind(model.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY)
    mask = batch["response_mask"].bool()
    width = mask.shape[1]

    def outputs() -> tuple[Tensor, Tensor]:
        lps, ents = [], []
        for i in range(len(mask)):
            real = batch["attention_mask"][i].bool()
            ids = batch["input_ids"][i][real][None]
            n = int(real[-width:].sum())
            shown = model_arguments(ids, images[i] if images else None)
            logits = model(input_ids=ids, use_cache=False, **shown).logits
            log_p = torch.log_softmax(logits[0, -n - 1 : -1] / TEMPERATURE, -1)
            lp, ent = log_p.gather(1, ids[0, -n:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
            lps.append(torch.nn.functional.pad(lp, (0, width - n)))
            ents.append(torch.nn.functional.pad(ent, (0, width - n)))
        zero = torch.zeros(())
        return torch.where(mask, torch.stack(lps), zero), torch.where(mask, torch.stack(ents), zero)

    with torch.no_grad():
        first = outputs()
    result: dict[str, Any] = {"log_probs": first[0], "entropys": first[1], "loss": [], "grad_norm": [], "params": []}
    for _ in range(steps):
        optimizer.zero_grad()
        lp, ent = outputs()
        loss = torch.where(mask, -lp * batch["advantages"] - 0.1 * ent, torch.zeros(())).sum() / mask.sum()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        result["loss"].append(float(loss.detach()))
        result["grad_norm"].append(float(norm))
        result["params"].append({name: p.detach().clone() for name, p in model.named_parameters()})
    return result
