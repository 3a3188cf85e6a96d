"""What is checked: everything that the registries hold when the self-test starts, and the losses built in."""

from __future__ import annotations

import fnmatch
import inspect
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from verl.algorithms.kl import KL_PENALTIES, FixedKLController
from verl.algorithms.registry import ADV_ESTIMATORS, POLICY_LOSSES, fields_needed, make_state
from verl.config import ActorConfig, AlgorithmConfig, CriticConfig, RewardModelConfig
from verl.config.actor import LOSS_AGG_MODES
from verl.protocol import DataProto
from verl.schema import FIELDS
from verl.selftest.backends import Backend
from verl.selftest.batches import REWARD_COMPONENTS, Fields, add_fields
from verl.selftest.splits import PLAIN, Cut, apply_cut, soil, undo
from verl.trainer.ppo.advantage import apply_kl_penalty, compute_advantage
from verl.workers.losses import ActorLoss, actor_loss, critic_loss, implicit_reward_model_loss, sft_loss

#: names that stand for the same KL estimate as another
_KL_ALIASES = frozenset({"kl", "mse", "low_var_kl"})
#: divisor of seq-mean-token-sum-norm; not given, it is the padded width, which a cut may change
LOSS_SCALE = 10
_FIELD_OF_PARAMETER = {"index": "uid"}
_MADE_BY_ENGINES = frozenset({"values", "old_log_probs", "entropys"})


#: Settings under which a small batch exercises what a name is about, by kind and name; the first of each is what the
#: fast part uses. A batch of 26 tokens would hardly meet a share of 0.0002, or a bound of 3 on a ratio.
_SETTINGS: dict[tuple[str, str], tuple[dict[str, Any], ...]] = {
    ("estimator", "grpo"): ({}, {"norm_adv_by_std_in_grpo": False}),
    ("estimator", "grpo_passk"): ({}, {"norm_adv_by_std_in_grpo": False}),
    ("estimator", "gdpo"): ({}, {"gdpo_reward_keys": REWARD_COMPONENTS}),
    ("estimator", "gae"): ({}, {"lam_critic": 1.0, "length_adaptive_alpha": 0.5}),
    ("estimator", "gigpo"): ({}, {"gigpo.mode": "mean_std_norm"}),
    ("loss", "vanilla"): ({"clip_ratio_high": 0.1, "clip_ratio_c": 1.2},),
    ("loss", "gspo"): ({"clip_ratio_low": 0.02, "clip_ratio_high": 0.03},),
    ("loss", "gspo_token"): ({"clip_ratio_low": 0.02, "clip_ratio_high": 0.03},),
    ("loss", "clip_cov"): ({"policy_loss.clip_cov_ratio": 0.2, "policy_loss.clip_cov_lb": 0.05},),
    ("loss", "kl_cov"): ({"policy_loss.kl_cov_ratio": 0.2},),
    ("loss", "dppo_tv"): ({"clip_ratio_low": 0.002, "clip_ratio_high": 0.003},),
    ("loss", "dppo_kl"): ({"clip_ratio_low": 0.0005, "clip_ratio_high": 0.001},),
    ("loss", "bypass_mode"): (
        {},
        {"policy_loss.bypass_loss_type": "reinforce", "policy_loss.bypass_is": "token"},
        {"policy_loss.bypass_loss_type": "reinforce", "policy_loss.bypass_is": "sequence"},
    ),
}


@dataclass(frozen=True)
class Entry:
    """One subject of the self-test.

    Attributes:
        kind: ``estimator``, ``loss``, ``entropy``, ``kl``, ``kl-reward``, ``value``, ``sft`` or ``implicit-reward``.
        name: in its registry.
        agg: ``loss_agg_mode``.
        weights: whether the batch has rollout importance weights.
        settings: keys of its section (``actor`` or ``algorithm``) that differ from their defaults.
        on_policy: the old log-probabilities are those of the policy itself, computed under the same cut.
    """

    kind: str
    name: str
    agg: str = "token-mean"
    weights: bool = False
    settings: tuple[tuple[str, Any], ...] = ()
    on_policy: bool = False

    @property
    def row(self) -> str:
        """The row of the report."""
        return f"{self.kind} {self.name}" if self.name else self.kind

    @property
    def main(self) -> bool:
        """Whether this is the form of the name that its laws speak of."""
        return not self.weights and self.settings == _settings(self.kind, self.name, full=False)[0]

    @property
    def variant(self) -> str:
        """What distinguishes it within its row."""
        notes = ["" if self.agg == "token-mean" else self.agg, "rollout weights" if self.weights else ""]
        notes += [f"{key.rpartition('.')[2]}={value}" for key, value in self.settings]
        return ", ".join(filter(None, notes))


@dataclass
class Outcome:
    """What an entry gave under one cut.

    Attributes:
        scalars: the loss and the metrics.
        gradient: by parameter.
        fields: ``(B, R)`` results with the batch's own rows and columns.
        log_ratio: largest distance of new and old log-probabilities, where the entry compares them.
    """

    scalars: dict[str, float] = field(default_factory=dict)
    gradient: dict[str, Tensor] = field(default_factory=dict)
    fields: dict[str, Tensor] = field(default_factory=dict)
    log_ratio: float | None = None


def enumerate_entries(full: bool = False, only: Iterable[str] = ()) -> list[Entry]:
    """All entries, from the registries as they are now.

    Args:
        full: every aggregation and alias, and the losses with rollout weights too.
        only: patterns such as ``"loss *"`` for the rows to keep; none keeps all.
    """
    patterns = list(only)
    entries = list(_all_entries(full))
    return [e for e in entries if not patterns or any(fnmatch.fnmatchcase(e.row, p) for p in patterns)]


def _all_entries(full: bool) -> Iterator[Entry]:
    modes = LOSS_AGG_MODES if full else LOSS_AGG_MODES[:1]
    for name in ADV_ESTIMATORS:
        for settings in _settings("estimator", name, full):
            yield Entry("estimator", name, settings=settings)
    for name in POLICY_LOSSES:
        first, *others = _settings("loss", name, full)
        for mode in modes:
            yield Entry("loss", name, mode, settings=first)
        for settings in others:
            yield Entry("loss", name, settings=settings)
        if full and takes_weights(name):
            yield Entry("loss", name, weights=True, settings=first)
    for mode in modes:
        yield Entry("entropy", "", mode)
    kinds = [name for name in KL_PENALTIES if name != "full" and (full or name not in _KL_ALIASES)]
    for name, plus in itertools.product(kinds, ("", "+")):
        yield Entry("kl", name + plus)
    for name in kinds:
        yield Entry("kl-reward", name)
    for mode in modes:
        yield Entry("value", "", mode)
    yield Entry("sft", "")
    yield Entry("implicit-reward", "")


def _settings(kind: str, name: str, full: bool) -> list[tuple[tuple[str, Any], ...]]:
    choices = [tuple(choice.items()) for choice in _SETTINGS.get((kind, name), ({},))]
    return choices if full else choices[:1]


def takes_weights(loss_name: str) -> bool:
    """Whether a policy loss has a parameter for rollout importance weights."""
    return "rollout_is_weights" in inspect.signature(POLICY_LOSSES[loss_name]).parameters


def estimator_fields(name: str) -> frozenset[str]:
    """Batch fields that an estimator's parameters name: all it needs, and those that the schema knows."""
    fn = ADV_ESTIMATORS[name]
    named = {_FIELD_OF_PARAMETER.get(p, p) for p in inspect.signature(fn).parameters}
    return fields_needed(fn) | (named & set(FIELDS))


def prepare(entry: Entry, base: Mapping[str, Any]) -> Fields:
    """The batch of an entry: the base, and whatever else its parameters name."""
    batch = dict(base)
    if entry.kind == "estimator":
        add_fields(batch, estimator_fields(entry.name) - _MADE_BY_ENGINES)
        return batch
    loss = build_loss(entry)
    if loss is None:
        return batch
    add_fields(batch, loss.fields - {"response_mask"})
    if entry.kind == "loss":
        # What the loss makes itself from the whole batch is made under each cut anew.
        made = set(_prepared(loss, batch))
        add_fields(batch, (loss.optional_fields - made) if entry.weights else ())
    if entry.kind in ("entropy", "kl"):  # the policy loss stays silent, so that the term under test speaks alone
        batch["advantages"] = torch.zeros_like(batch["advantages"])
    return batch


def build_loss(entry: Entry) -> Any:
    """The loss that a worker would build; None for an entry that trains nothing."""
    if entry.kind == "kl-reward":
        return None
    if entry.kind == "sft":
        return sft_loss()
    if entry.kind == "implicit-reward":
        return implicit_reward_model_loss(RewardModelConfig())
    if entry.kind == "value":
        critic = CriticConfig()
        critic.loss_agg_mode = entry.agg
        critic.loss_scale_factor = LOSS_SCALE
        return critic_loss(critic)
    actor = ActorConfig()
    actor.loss_agg_mode = entry.agg
    actor.loss_scale_factor = LOSS_SCALE
    if entry.kind == "loss":
        actor.policy_loss.loss_mode = entry.name
        _set(actor, entry.settings)
    elif entry.kind == "entropy":
        actor.entropy_coeff = 1.0
    elif entry.kind == "kl":
        actor.use_kl_loss, actor.kl_loss_coef, actor.kl_loss_type = True, 1.0, entry.name
    return actor_loss(actor)


def _set(config: Any, settings: Iterable[tuple[str, Any]]) -> None:
    for key, value in settings:
        *path, name = key.split(".")
        section = config
        for part in path:
            section = getattr(section, part)
        setattr(section, name, value)


def _prepared(loss: Any, fields: Mapping[str, Any]) -> Mapping[str, Tensor]:
    """Fields that a policy loss makes from the whole batch before it is split."""
    return loss.prepare(fields) if isinstance(loss, ActorLoss) else {}


def run(entry: Entry, backend: Backend, batch: Mapping[str, Any], cut: Cut = PLAIN) -> Outcome:
    """Run an entry under a cut. With several ranks: collective, each rank trains on its share of the rows."""
    whole = apply_cut(batch, cut)
    if entry.kind == "estimator":
        return _run_estimator(entry, backend, whole, cut)
    if entry.kind == "kl-reward":
        return _run_kl_reward(entry, whole, cut)
    head = "value" if entry.kind == "value" else "lm"
    loss = build_loss(entry)
    outcome = Outcome()
    if entry.on_policy:
        made = backend.forward(head, tensors_of(_share(whole, backend, cut)), cut)["log_probs"]
        whole["old_log_probs"] = backend.gather({"old_log_probs": made}, cut)["old_log_probs"]
        outcome.fields["advantages"] = undo(whole["advantages"], cut)
    whole = {**whole, **_prepared(loss, whole)}
    _update(outcome, backend, head, _share(whole, backend, cut), loss, cut)
    return outcome


def _run_estimator(entry: Entry, backend: Backend, whole: Fields, cut: Cut) -> Outcome:
    """A step as the trainer takes it: old log-probabilities, values, advantages of the whole batch, update."""
    mine = _share(whole, backend, cut)
    tensors = tensors_of(mine)
    out = backend.forward("lm", tensors, cut)
    made = {"old_log_probs": out["log_probs"], "entropys": out["entropys"]}
    if "values" in estimator_fields(entry.name):
        made["values"] = backend.forward("value", tensors, cut)["values"]
    everyone = {**whole, **backend.gather(made, cut)}
    if cut.garbage is not None:
        everyone = soil(everyone, cut.garbage)
    config = AlgorithmConfig(adv_estimator=entry.name, gamma=0.99, lam=0.95)
    _set(config, entry.settings)
    results = estimate(config, everyone)
    outcome = Outcome(fields={name: undo(value, cut) for name, value in results.items()})
    outcome.fields |= {name: undo(backend.gather({name: value}, cut)[name], cut) for name, value in made.items()}
    trained = {**everyone, **results}
    trained.pop("rollout_is_weights", None)  # they would scale the loss, which is to tell of the advantages alone
    _update(outcome, backend, "lm", _share(trained, backend, cut), actor_loss(ActorConfig()), cut)
    return outcome


def estimate(config: AlgorithmConfig, fields: Mapping[str, Any]) -> dict[str, Tensor]:
    """``advantages`` and ``returns`` of the whole batch, as the trainer computes them.

    An estimator that remembers gets a new memory, and sees the batch twice: the second answer tells what it remembers.
    """
    state = make_state(ADV_ESTIMATORS[config.adv_estimator], config)
    memory: dict[str, Any] = {} if state is None else {"state": state}
    if memory:
        compute_advantage(DataProto.from_single_dict(dict(fields)), config, **memory)
    data = compute_advantage(DataProto.from_single_dict(dict(fields)), config, **memory)
    assert data.batch is not None
    return {name: data.batch[name] for name in ("advantages", "returns")}


def _run_kl_reward(entry: Entry, whole: Fields, cut: Cut) -> Outcome:
    names = ("token_level_scores", "old_log_probs", "ref_log_prob", "response_mask")
    data = DataProto.from_single_dict({name: whole[name] for name in names})
    data, metrics = apply_kl_penalty(data, FixedKLController(0.1), entry.name)
    assert data.batch is not None
    return Outcome(scalars=dict(metrics), fields={"rewards": undo(data.batch["token_level_rewards"], cut)})


def _update(outcome: Outcome, backend: Backend, head: str, mine: Fields, loss: Any, cut: Cut) -> None:
    step = backend.update(head, tensors_of(mine), loss, cut)
    outcome.scalars = {"loss": step.loss, **step.metrics}
    outcome.gradient = step.gradient
    outcome.log_ratio = step.log_ratio


def _share(whole: Mapping[str, Any], backend: Backend, cut: Cut) -> Fields:
    """The rows of this rank."""
    if not cut.spread:
        return dict(whole)
    dp_rank = backend.rank // cut.sequence
    first = sum(cut.spread[:dp_rank])
    return {name: value[first : first + cut.spread[dp_rank]] for name, value in whole.items()}


def tensors_of(fields: Mapping[str, Any]) -> TensorDict:
    """The tensors among the fields, as engines take them."""
    tensors = {name: value for name, value in fields.items() if isinstance(value, Tensor)}
    return TensorDict(tensors, batch_size=[len(tensors["input_ids"])])


def complete_base(backend: Backend, base: Fields) -> Fields:
    """Add log-probabilities near the policy's own and values near the critic's to the base batch."""
    batch = dict(base)
    tensors = tensors_of(base)
    mask = base["response_mask"] != 0
    policy = backend.forward("lm", tensors, PLAIN)
    near = {
        "old_log_probs": policy["log_probs"],
        "values": backend.forward("value", tensors, PLAIN)["values"],
    }
    near |= {"ref_log_prob": near["old_log_probs"], "rollout_log_probs": near["old_log_probs"]}
    batch["entropys"] = policy["entropys"]
    for number, (name, value) in enumerate(sorted(near.items())):
        noise = torch.randn(value.shape, generator=torch.Generator().manual_seed(number + 1))
        # The squared distance from the reference loses digits as it gets smaller.
        scale = 0.6 if name == "ref_log_prob" else 0.3
        batch[name] = torch.where(mask, value + scale * noise, 0.0)
    return batch
