"""SPO: one sample a prompt, against a baseline that is remembered between epochs (Xu and Ding, arXiv:2509.13232)."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from verl.algorithms.group import sequence_scores, spread
from verl.algorithms.registry import EstimatorState, register_adv_est
from verl.algorithms.settings import setting
from verl.errors import CheckpointError, ConfigError, SchemaError


class ValueTracker:
    r"""The expected score of each prompt, learnt from its visits.

    An entry holds a value *v* and the weight *n* of the evidence behind it. A visit with *m* samples, whose scores
    sum to *S*, first discounts the old evidence, the more the policy has changed since (by *D* nats):

    .. math:: \rho = \operatorname{clip}\bigl(2^{-D/D_{half}}, \rho_{min}, \rho_{max}\bigr), \qquad
        v \leftarrow \frac{\rho n v + S}{\rho n + m}, \qquad n \leftarrow \rho n + m

    For scores of 0 and 1 this is the Beta posterior with counts :math:`\alpha = nv` and :math:`\beta = n(1-v)`.

    Args:
        rho_min: least share of the evidence that a visit keeps.
        rho_max: largest share.
        half_life_kl: :math:`D_{half}` in nats.
        kl_per_step: *D* for each training step since the last visit, where it is not measured.

    Raises:
        ConfigError: bounds or scales out of range.
    """

    def __init__(
        self,
        rho_min: float = 0.875,
        rho_max: float = 0.96,
        half_life_kl: float = 0.06,
        kl_per_step: float = 0.001,
    ) -> None:
        if not 0 <= rho_min <= rho_max <= 1:
            raise ConfigError(f"algorithm.spo: rho_min={rho_min} and rho_max={rho_max} must be ordered within 0 to 1")
        if half_life_kl <= 0 or kl_per_step < 0:
            raise ConfigError(
                f"algorithm.spo: half_life_kl={half_life_kl} must be positive and kl_per_step={kl_per_step} at least 0"
            )
        self.rho_min, self.rho_max = rho_min, rho_max
        self.half_life_kl, self.kl_per_step = half_life_kl, kl_per_step
        self.step = 0
        self._entries: dict[str, tuple[float, float, int]] = {}  # value, weight, step of the last visit

    def __len__(self) -> int:
        return len(self._entries)

    def value(self, key: str, default: float) -> float:
        """Expected score of a prompt; ``default`` for one that was never visited."""
        entry = self._entries.get(key)
        return default if entry is None else entry[0]

    def update(self, keys: Sequence[str], scores: Sequence[float], prior: float, kl: Sequence[float] | None) -> None:
        """Take in the scores of a step, one for each sample.

        Args:
            keys: the prompt of each sample.
            scores: its score.
            prior: value of a prompt at its first visit, with the weight of one sample.
            kl: divergence in nats of the policy from that of the prompt's last visit, for each sample.
        """
        visits: dict[str, list[int]] = {}
        for row, key in enumerate(keys):
            visits.setdefault(key, []).append(row)
        for key, rows in visits.items():
            value, kept = prior, 1.0
            if key in self._entries:
                value, weight, last = self._entries[key]
                change = self.kl_per_step * (self.step - last) if kl is None else sum(kl[r] for r in rows) / len(rows)
                kept = weight * min(max(2.0 ** (-change / self.half_life_kl), self.rho_min), self.rho_max)
            total = kept + len(rows)
            # Sorted: the sum must not depend on the order of the samples.
            evidence = sum(sorted(scores[r] for r in rows))
            self._entries[key] = ((kept * value + evidence) / total, total, self.step)
        self.step += 1

    def state_dict(self) -> dict[str, Any]:
        """The step counter and all entries."""
        return {"step": self.step, "entries": {key: list(entry) for key, entry in self._entries.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`.

        Raises:
            CheckpointError: it is something else.
        """
        try:
            entries = {str(key): (float(v), float(n), int(last)) for key, (v, n, last) in state["entries"].items()}
            step = int(state["step"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"the saved state of spo is not a value tracker's ({error!r}); resume with the algorithm.adv_estimator "
                "that the checkpoint was made with"
            ) from error
        self.step, self._entries = step, entries


def make_value_tracker(config: Any = None) -> EstimatorState:
    """The state of SPO from the ``algorithm`` section."""
    section = setting(config, "spo", None)
    names = {"rho_min": 0.875, "rho_max": 0.96, "half_life_kl": 0.06, "kl_per_step": 0.001}
    return ValueTracker(**{name: setting(section, name, default) for name, default in names.items()})


def prompt_keys(
    prompts: Tensor, attention_mask: Tensor, images: Sequence[Mapping[str, Any] | None] | None = None
) -> list[str]:
    """A name for each prompt that depends on its tokens and images alone, not on padding: ``(B, P)`` to B strings."""
    present = attention_mask[:, : prompts.shape[1]].bool().cpu()
    ids = prompts.long().cpu()
    shown = [b""] * len(ids) if images is None else _image_digests(images)
    return [
        hashlib.blake2b(row[mask].numpy().tobytes() + image, digest_size=12).hexdigest()
        for row, mask, image in zip(ids, present, shown, strict=True)
    ]


def _image_digests(images: Sequence[Mapping[str, Any] | None]) -> list[bytes]:
    """Digests of the prompts' patches. Where they are in pieces, the last one came behind the prompt."""
    made: dict[int, bytes] = {}
    for row in images:
        if id(row) not in made:
            pixels = [] if row is None else row["pixel_values"]
            digest = hashlib.blake2b(digest_size=12)
            for piece in pixels[:-1] if isinstance(pixels, list) else [pixels]:
                digest.update(piece.float().contiguous().numpy().data)
            made[id(row)] = b"" if row is None else digest.digest()
    return [made[id(row)] for row in images]


@register_adv_est("spo", state=make_value_tracker)
def compute_spo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    prompts: Tensor,
    attention_mask: Tensor,
    state: EstimatorState,
    policy_kl: Tensor | None = None,
    multi_modal_inputs: Sequence[Mapping[str, Any] | None] | None = None,
    epsilon: float = 1e-8,
    config: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    r"""SPO: the score against the prompt's remembered value, standardised over the batch.

    .. math:: A_i = \operatorname{standardise}_{batch}\bigl(s_i - v(x_i)\bigr)

    *v* is the value *before* this step, so the baseline does not depend on the sample; afterwards the tracker takes
    the scores in (:class:`ValueTracker`). A prompt's first visit has the mean score of the batch as its baseline.
    Statistics run over the samples that have a token (n - 1). Groups are not needed; several samples of one prompt
    count as one visit.

    The paper fills the tracker with samples taken before training, and measures *D* by running stored responses
    through the policy again. Here values start at the first visit, and *D* grows with the steps since the last one
    unless the batch has ``policy_kl``.

    Args:
        token_level_rewards: ``(B, R)``.
        response_mask: ``(B, R)``.
        prompts: ``(B, P)`` token ids, which identify the prompt.
        attention_mask: ``(B, S)``; its first P columns say which of them are padding.
        state: the tracker, which this call updates.
        policy_kl: ``(B,)`` divergence in nats of the policy from that of the prompt's last visit.
        multi_modal_inputs: images of the rows, which identify the prompt too.
        epsilon: keeps the division finite.
        config: not used here; ``spo`` of the ``algorithm`` section shapes the tracker.

    Raises:
        SchemaError: ``state`` is not a value tracker.
    """
    if not isinstance(state, ValueTracker):
        raise SchemaError(f"spo keeps its baselines in a ValueTracker; got a {type(state).__name__}")
    with torch.no_grad():
        scores = sequence_scores(token_level_rewards, response_mask)
        present = response_mask.bool().any(-1)
        keys = prompt_keys(prompts, attention_mask, multi_modal_inputs)
        prior = float(scores[present].sort().values.mean()) if bool(present.any()) else 0.0
        baseline = scores.new_tensor([state.value(key, prior) for key in keys])
        advantage = scores - baseline
        chosen = advantage[present]
        if chosen.numel() > 1:
            advantage = (advantage - chosen.mean()) / (chosen.std() + epsilon)
        seen = [row for row, there in enumerate(present.tolist()) if there]
        values, kl = scores.tolist(), None if policy_kl is None else policy_kl.double().tolist()
        state.update(
            [keys[r] for r in seen], [values[r] for r in seen], prior, None if kl is None else [kl[r] for r in seen]
        )
        result = spread(advantage, response_mask)
        return result, result.clone()
