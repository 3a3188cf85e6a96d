"""The two plug-in points of the algorithm layer: advantage estimators and policy losses.

An estimator's parameter names are its contract. ``token_level_rewards``, ``values``, ``response_mask``, ... are
fields of the batch, ``index`` is the field ``uid``, and every other name is a setting of the ``algorithm``
section. Whoever calls an estimator reads the names (:func:`fields_needed`, :func:`call_estimator`), so a new
estimator needs no change in the trainer. The same holds for the extra parameters of a policy loss
(:func:`loss_fields`).

A **stateful estimator** remembers something between steps. It registers a factory of its state and takes the state
as the parameter ``state``; the trainer makes one state per run (:func:`make_state`), passes it to each call and keeps
``state_dict()`` in checkpoints.

A **prepared policy loss** needs a statistic of the whole batch, which a micro-batch cannot give. It registers a
function that makes fields from the complete batch (:func:`prepare_loss_fields`), once per step, and reads them as
extra parameters.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, Protocol, TypeAlias, TypeVar, runtime_checkable

from torch import Tensor

from verl.algorithms.settings import has_setting, setting
from verl.errors import ConfigError, SchemaError
from verl.utils.metrics import Metric
from verl.utils.registry import Registry

MetricValue: TypeAlias = float | Tensor | Metric
AdvantageFn: TypeAlias = Callable[..., tuple[Tensor, Tensor]]
PolicyLossFn: TypeAlias = Callable[..., tuple[Tensor, Mapping[str, MetricValue]]]
AnyFn = TypeVar("AnyFn", bound=Callable[..., Any])


@runtime_checkable
class EstimatorState(Protocol):
    """What a stateful estimator keeps between steps."""

    def state_dict(self) -> dict[str, Any]:
        """All of it, as plain Python values, lists, dicts and tensors, for a checkpoint."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what :meth:`state_dict` gave."""


StateFactory: TypeAlias = Callable[[Any], EstimatorState]
PrepareFn: TypeAlias = Callable[[Mapping[str, Any], Any], Mapping[str, Tensor]]

ADV_ESTIMATORS: Registry[AdvantageFn] = Registry("advantage estimator")
POLICY_LOSSES: Registry[PolicyLossFn] = Registry("policy loss")

_STATE_FACTORIES: dict[AdvantageFn, StateFactory] = {}
_PREPARE: dict[PolicyLossFn, PrepareFn] = {}

# Parameters that every policy loss has; further ones are batch fields.
_LOSS_PARAMETERS = (
    "old_log_prob",
    "log_prob",
    "advantages",
    "response_mask",
    "loss_agg_mode",
    "config",
    "rollout_is_weights",
)
# Required parameters that are not batch fields: the configuration, hyper-parameters, and the whole batch.
_NOT_FIELDS = frozenset({"config", "gamma", "lam", "norm_adv_by_std_in_grpo", "batch", "non_tensor_batch", "state"})
_PARAMETER_OF_FIELD = {"uid": "index"}
_FIELD_OF_PARAMETER = {parameter: field for field, parameter in _PARAMETER_OF_FIELD.items()}


def _name(name_or_enum: str | Enum) -> str:
    # A str-enum member hashes by its member name, not by its value, so it must not reach the table as a key.
    return str(name_or_enum.value) if isinstance(name_or_enum, Enum) else name_or_enum


def register_adv_est(name_or_enum: str | Enum, *, state: StateFactory | None = None) -> Callable[[AnyFn], AnyFn]:
    """Decorator: make an estimator selectable as ``algorithm.adv_estimator``.

    The function gets the batch fields that its parameters name, each ``(B, R)`` (``index``: ``(B,)`` object
    array of uids), and returns ``(advantages, returns)``, both ``(B, R)`` float32.

    Args:
        name_or_enum: the name.
        state: makes the state of a stateful estimator from the ``algorithm`` section; the function then has a
            parameter ``state``.

    Raises:
        ConfigError: another function has this name.
    """

    def add(fn: AnyFn) -> AnyFn:
        ADV_ESTIMATORS.register(_name(name_or_enum))(fn)
        if state is not None:
            _STATE_FACTORIES[fn] = state
        return fn

    return add


def get_adv_estimator_fn(name_or_enum: str | Enum) -> AdvantageFn:
    """Return the estimator of that name; ``ConfigError`` lists the known ones."""
    return ADV_ESTIMATORS[_name(name_or_enum)]


def make_state(fn: AdvantageFn, config: Any = None) -> EstimatorState | None:
    """A fresh state for ``fn``, from the ``algorithm`` section; ``None`` if it is not stateful."""
    factory = _STATE_FACTORIES.get(fn)
    return None if factory is None else factory(config)


def register_policy_loss(name: str | Enum, *, prepare: PrepareFn | None = None) -> Callable[[AnyFn], AnyFn]:
    """Decorator: make a policy loss selectable as ``actor.policy_loss.loss_mode``.

    The function is called as ``fn(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config,
    rollout_is_weights=None)`` with ``(B, R)`` tensors and returns ``(scalar loss, metrics)``. Floats and 0-d tensors
    among the metrics are means over the micro-batch's response tokens and combine weighted by token count; a
    :class:`verl.utils.metrics.Metric` says itself how it combines. Any further parameter names a batch field.

    Args:
        name: the name.
        prepare: makes fields from the whole batch, once per step, before it is split: called as ``prepare(fields,
            config)`` with the batch's fields by name and the actor section; returns fields by name, with one row per
            sample.

    Raises:
        ConfigError: another function has this name.
    """

    def add(fn: AnyFn) -> AnyFn:
        POLICY_LOSSES.register(_name(name))(fn)
        if prepare is not None:
            _PREPARE[fn] = prepare
        return fn

    return add


def get_policy_loss_fn(name: str | Enum) -> PolicyLossFn:
    """Return the policy loss of that name; ``ConfigError`` lists the known ones."""
    return POLICY_LOSSES[_name(name)]


def loss_fields(fn: PolicyLossFn) -> tuple[frozenset[str], frozenset[str]]:
    """Batch fields that a policy loss takes beyond the common parameters: ``(required, optional)``.

    A parameter without a default is required.
    """
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    # By position for the common ones: a plug-in may call them something else.
    extra = [
        p
        for i, p in enumerate(inspect.signature(fn).parameters.values())
        if p.kind in named and p.name not in _LOSS_PARAMETERS and i >= len(_LOSS_PARAMETERS) - 1
    ]
    required = frozenset(p.name for p in extra if p.default is p.empty)
    return required, frozenset(p.name for p in extra) - required


def prepare_loss_fields(fn: PolicyLossFn, fields: Mapping[str, Any], config: Any = None) -> Mapping[str, Tensor]:
    """Fields that ``fn`` wants made from the whole batch; empty for most losses.

    Args:
        fn: the policy loss.
        fields: fields of the complete batch by name.
        config: the actor section.
    """
    prepare = _PREPARE.get(fn)
    return {} if prepare is None else prepare(fields, config)


def is_prepared(fn: PolicyLossFn) -> bool:
    """Whether ``fn`` wants fields made from the whole batch."""
    return fn in _PREPARE


def fields_needed(fn: Callable[..., Any]) -> frozenset[str]:
    """Names of the batch fields without which ``fn`` cannot run.

    These are its parameters that have no default and are not settings (``config``, ``gamma``, ...); the
    parameter ``index`` stands for the field ``uid``.
    """
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return frozenset(
        _FIELD_OF_PARAMETER.get(p.name, p.name)
        for p in inspect.signature(fn).parameters.values()
        if p.kind in named and p.default is p.empty and p.name not in _NOT_FIELDS
    )


def call_estimator(
    fn: AdvantageFn,
    fields: Mapping[str, Any],
    config: Any = None,
    *,
    settings: Mapping[str, Any] | None = None,
    whole: Mapping[str, Any] | None = None,
    state: EstimatorState | None = None,
) -> tuple[Tensor, Tensor]:
    """Call an estimator with what its parameter names ask for.

    A parameter is looked up as a batch field, then in ``settings``, then in ``config``, then takes its own
    default. ``config`` itself is passed to a parameter of that name.

    Args:
        fn: the estimator.
        fields: batch fields by name, tensors and object arrays together.
        config: the ``algorithm`` section, attribute or key access.
        settings: values that go before ``config``.
        whole: objects for parameters that ask for the complete batch (``batch``, ``non_tensor_batch``).
        state: what a stateful estimator keeps between steps, made once by :func:`make_state`.

    Raises:
        ConfigError: the estimator is stateful and ``state`` is ``None``.
        SchemaError: a required field is missing.
    """
    settings, whole = settings or {}, whole or {}
    if fn in _STATE_FACTORIES:
        if state is None:
            raise ConfigError(
                f"advantage estimator {fn.__name__} keeps a state between steps; make it once with "
                "verl.algorithms.registry.make_state and pass it as `state`"
            )
        whole = {**whole, "state": state}
    kwargs: dict[str, Any] = {}
    missing: list[str] = []
    for p in inspect.signature(fn).parameters.values():
        if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            continue
        field = _FIELD_OF_PARAMETER.get(p.name, p.name)
        if p.name == "config":
            kwargs["config"] = config
        elif p.name in whole:
            kwargs[p.name] = whole[p.name]
        elif field in fields:
            kwargs[p.name] = fields[field]
        elif p.name in settings:
            kwargs[p.name] = settings[p.name]
        elif config is not None and has_setting(config, p.name):
            value = setting(config, p.name, None)
            # An unset (None) setting must not displace the estimator's own default.
            if value is not None or p.default is p.empty:
                kwargs[p.name] = value
        elif p.default is p.empty:
            missing.append(field)
    if missing:
        name = getattr(fn, "__name__", repr(fn))
        raise SchemaError(
            f"advantage estimator {name} needs the batch field(s) {', '.join(sorted(missing))}, but the batch has "
            f"{', '.join(sorted(fields))}; enable the role that makes them (a critic for `values`, a reference for "
            "`ref_log_prob`, sampled groups for `uid`) or choose another algorithm.adv_estimator"
        )
    return fn(**kwargs)
