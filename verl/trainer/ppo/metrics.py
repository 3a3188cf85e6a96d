"""Numbers about a step, from its batch and its clock.

Pure functions: a :class:`~verl.protocol.DataProto` in, a flat ``{name: float}`` out. Everything is masked: what lies
outside ``response_mask`` does not count. A response without a token in it has no score to speak of and is left out of
the score and reward statistics: an empty (aborted) one, which ``response/aborted_ratio`` counts, and one for which the
reward function abstained, which ``reward/abstained`` counts.

Every name has a sentence in :data:`GLOSSARY`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.agent_loop.metrics import agent_metrics
from verl.protocol import DataProto
from verl.trainer.ppo.fields import tensors_of
from verl.trainer.ppo.glossary import GLOSSARY, describe, undocumented
from verl.trainer.ppo.validation_metrics import process_validation_metrics
from verl.utils.metrics import Metric, MetricSet
from verl.utils.seqlen_balancing import seqlen_balance_metrics

__all__ = [
    "GLOSSARY",
    "compute_data_metrics",
    "compute_staleness_metrics",
    "compute_throughput_metrics",
    "compute_timing_metrics",
    "describe",
    "process_validation_metrics",
    "reduce_metrics",
    "seqlen_balance_metrics",
    "undocumented",
]


def _stats(prefix: str, values: Tensor) -> dict[str, float]:
    """Mean, max and min of a flat tensor; nothing for an empty one."""
    if values.numel() == 0:
        return {}
    low, high = values.aminmax()
    mean = values.mean(dtype=torch.float64)
    return {f"{prefix}/mean": mean.item(), f"{prefix}/max": float(high), f"{prefix}/min": float(low)}


def _lengths(batch: DataProto) -> tuple[Tensor, Tensor]:
    """Prompt and response lengths ``(B,)``; a response's length counts tool output too."""
    tensors = tensors_of(batch)
    width = tensors["responses"].shape[-1]
    attention = tensors["attention_mask"].bool()
    return attention[:, :-width].sum(-1), attention[:, -width:].sum(-1)


def _masked_row_sums(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, values.double(), 0.0).sum(-1)


def compute_data_metrics(batch: DataProto, use_critic: bool = True) -> dict[str, float]:
    """Scores, advantages and lengths of a batch.

    Args:
        batch: a batch after the advantage stage; fields that it lacks give no metrics.
        use_critic: report values and explained variance.

    Returns:
        ``critic/{score,rewards,advantages,returns,values}/*``, ``critic/vf_explained_var``, ``actor/entropy``,
        ``response_length/*``, ``response_length_non_aborted/*``, ``response/{aborted,overlong}_ratio``,
        ``prompt_length/*``, ``num_turns/*``, ``tool_call_counts/*``, ``agent/*`` and ``training/rollout_probs_diff_*``.
    """
    tensors = tensors_of(batch)
    mask = tensors["response_mask"].bool()
    places = mask.flatten().nonzero().squeeze(-1)  # of the tokens in the mask: found once, which is half of the work

    def tokens(name: str) -> Tensor:
        return tensors[name].flatten().index_select(0, places)

    prompt_length, response_length = _lengths(batch)
    present = response_length > 0
    metrics: dict[str, float] = {}

    columns = batch.non_tensor_batch
    last = tensors["last_row"] if "last_row" in tensors else torch.ones(len(batch), dtype=torch.bool)
    if not last.all():  # what is said of a trajectory is said once
        columns = {name: values[last.numpy()] for name, values in columns.items()}
    # Without a token in the mask there is no verdict: an empty response, or a reward function that abstained.
    scored = mask.any(-1) & last
    for name, key in (("score", "token_level_scores"), ("rewards", "token_level_rewards")):
        if key in tensors:
            sums = _masked_row_sums(tensors[key], mask)
            if "trajectory" in tensors:
                owners = tensors["trajectory"]
                sums = torch.zeros(int(owners.max()) + 1, dtype=sums.dtype).index_add_(0, owners, sums)[owners]
            metrics |= _stats(f"critic/{name}", sums[scored])
    for name in ("advantages", "returns"):
        if name in tensors:
            metrics |= _stats(f"critic/{name}", tokens(name))
    if use_critic and "values" in tensors:
        values = tokens("values").double()
        metrics |= _stats("critic/values", values)
        if "returns" in tensors and values.numel() > 0:
            returns = tokens("returns").double()
            total, unexplained = returns.var(correction=0), (returns - values).var(correction=0)
            # Constant returns leave nothing to explain; 0 reads as "no better than a constant".
            metrics["critic/vf_explained_var"] = (1.0 - unexplained / total).item() if total > 0 else 0.0
    if "entropys" in tensors and len(places):
        metrics["actor/entropy"] = tokens("entropys").mean(dtype=torch.float64).item()
    if "rollout_log_probs" in tensors and "old_log_probs" in tensors and len(places):
        trained, sampled = (tokens(name).double().exp() for name in ("old_log_probs", "rollout_log_probs"))
        difference = (trained - sampled).abs()
        metrics["training/rollout_probs_diff_mean"] = difference.mean().item()
        metrics["training/rollout_probs_diff_max"] = difference.max().item()
        metrics["training/rollout_probs_diff_std"] = difference.std(correction=0).item()

    response_limit = tensors["responses"].shape[-1]
    prompt_limit = tensors["attention_mask"].shape[-1] - response_limit
    metrics |= _length_metrics("response_length", response_length, response_limit)
    metrics |= _length_metrics("response_length_non_aborted", response_length[present], response_limit)
    metrics["response/aborted_ratio"] = 1.0 - present.double().mean().item() if len(present) else 0.0
    if "overlong" in tensors and len(present):
        metrics["response/overlong_ratio"] = tensors["overlong"].double().mean().item()
    metrics |= _length_metrics("prompt_length", prompt_length, prompt_limit)
    for prefix, keys in (("num_turns", ("num_turns", "__num_turns__")), ("tool_call_counts", ("tool_call_counts",))):
        for key in keys:
            if key in columns:
                metrics |= _stats(prefix, torch.tensor([float(v) for v in columns[key]]))
                break
    if "agent_info" in columns:
        metrics |= agent_metrics(list(columns["agent_info"]))
    return metrics


def _length_metrics(prefix: str, lengths: Tensor, limit: int) -> dict[str, float]:
    metrics = _stats(prefix, lengths)
    if metrics:
        metrics[f"{prefix}/clip_ratio"] = (lengths >= limit).double().mean().item()
    return metrics


def compute_staleness_metrics(batch: DataProto, version: int) -> dict[str, float]:
    """How old the weights are that sampled a batch.

    Args:
        batch: a batch after the update; responses without a token in the mask do not count.
        version: of the weights that the rollout had when the step began.

    Returns:
        ``training/staleness/{mean,max}``: versions between a response's first token and ``version``; where versions of
        tokens are known, ``training/stale_token_fraction``: share of the sampled tokens that older weights sampled.
    """
    tensors = tensors_of(batch)
    mask = tensors["response_mask"].bool()
    metrics: dict[str, float] = {}
    if "policy_version" in tensors and mask.any():
        ages = (version - tensors["policy_version"][mask.any(-1), 0]).double()
        metrics |= {"training/staleness/mean": ages.mean().item(), "training/staleness/max": ages.max().item()}
    if "token_versions" in tensors and mask.any():
        metrics["training/stale_token_fraction"] = (tensors["token_versions"][mask] < version).double().mean().item()
    return metrics


_PHASES_OVER_ALL_TOKENS = ("old_log_prob", "ref", "values", "adv", "update_critic", "update_actor")


def compute_timing_metrics(batch: DataProto, timing_raw: Mapping[str, float]) -> dict[str, float]:
    """Seconds of each phase, and milliseconds per token of those whose work is tokens.

    Args:
        batch: the step's batch.
        timing_raw: seconds by phase.

    Returns:
        ``timing_s/<phase>`` for every phase; ``timing_per_token_ms/<phase>`` for ``gen`` (per sampled token) and for
        ``old_log_prob, ref, values, adv, update_critic, update_actor`` (per prompt or response token).
    """
    tokens = dict.fromkeys(_PHASES_OVER_ALL_TOKENS, int(tensors_of(batch)["attention_mask"].bool().sum()))
    tokens["gen"] = int(tensors_of(batch)["response_mask"].bool().sum())
    metrics = {f"timing_s/{phase}": float(seconds) for phase, seconds in timing_raw.items()}
    for phase, count in tokens.items():
        if phase in timing_raw and count > 0:
            metrics[f"timing_per_token_ms/{phase}"] = timing_raw[phase] * 1000.0 / count
    return metrics


def compute_throughput_metrics(batch: DataProto, timing_raw: Mapping[str, float], n_devices: int) -> dict[str, float]:
    """Tokens of the step, its seconds, and tokens per second and device.

    Args:
        batch: the step's batch.
        timing_raw: has the seconds of the phase ``step``.
        n_devices: accelerators (on CPU: worker processes) of the run.

    Returns:
        ``perf/total_num_tokens``, ``perf/time_per_step``, ``perf/throughput``.
    """
    tokens = int(tensors_of(batch)["attention_mask"].bool().sum())
    seconds = float(timing_raw["step"])
    metrics = {"perf/total_num_tokens": float(tokens), "perf/time_per_step": seconds}
    if seconds > 0 and n_devices > 0:
        metrics["perf/throughput"] = tokens / seconds / n_devices
    return metrics


def reduce_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Reduce lists of observations to numbers.

    A name with the word ``max`` or ``min`` (words are separated by ``/``, ``_`` and ``@``) keeps the largest or
    smallest observation, every other name the mean. :class:`~verl.utils.metrics.Metric` observations combine by their
    own reduction. A scalar stays as it is; a name without observations is left out.
    """
    out: dict[str, float] = {}
    for name, observed in metrics.items():
        values = list(observed) if isinstance(observed, list | tuple | np.ndarray) else [observed]
        if not values:
            continue
        if all(isinstance(value, Metric) for value in values):
            out[name] = MetricSet.merged({name: value} for value in values)[name].value
            continue
        numbers = [float(value.value if isinstance(value, Metric) else value) for value in values]
        words = set(re.split(r"[/_@]", name))
        if "max" in words:
            out[name] = max(numbers)
        elif "min" in words:
            out[name] = min(numbers)
        else:
            out[name] = math.fsum(numbers) / len(numbers)
    return out
