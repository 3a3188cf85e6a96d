"""Rows and prompts that reach everything a model computes: longer than its windows, with its pad token inside."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from tensordict import TensorDict
from torch import Tensor

from verl.models.probe import Limit, Probe, make_probe
from verl.selftest.certificate.subject import Subject
from verl.trajectories import position_ids_from_mask


@dataclass(frozen=True)
class Rows:
    """What the engines compute.

    Attributes:
        probe: the rows of a training batch, longer than every window of the model.
        pad: the padding token.
        batch: the rows with advantages; one response has tokens that do not count.
        prompts: to sample from, two of them equal; the longest one ends before the largest window, so that sampling
            crosses it.
        not_reached: windows that no row is longer than.
    """

    probe: Probe
    pad: int
    batch: TensorDict
    prompts: list[list[int]]
    not_reached: tuple[Limit, ...]

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt."""
        return max(len(prompt) for prompt in self.prompts)


def make_rows(subject: Subject, *, pad: int, excluded: Collection[int], longest: int, room: int, seed: int = 0) -> Rows:
    """Rows for a model.

    Args:
        subject: the model.
        pad: the padding token.
        excluded: tokens that no row has.
        longest: no row has more tokens.
        room: tokens that are sampled after a prompt.
        seed: of the draw.
    """
    probe = make_probe(subject.config, pad_token_id=pad, excluded=excluded, seed=seed, longest=longest)
    batch = TensorDict(probe.batch(pad), batch_size=[len(probe.rows)])
    generator = torch.Generator().manual_seed(seed)
    batch["advantages"] = torch.randn(batch["response_mask"].shape, generator=generator)
    batch["row"] = torch.arange(len(probe.rows))
    batch["response_mask"][0, 2:4] = 0  # tokens that a tool wrote
    long = list(probe.rows[0].token_ids)
    largest = max((limit.tokens for limit in probe.reached), default=0)
    before = max(1, min(len(long), max(largest, 2 * room) - room // 2))
    short = list(probe.rows[-1].token_ids)
    inside = list(probe.rows[2].token_ids)
    prompts = [long[:before], short, list(short), short[:1], inside[: len(inside) // 2 + 1], long[:7]]
    return Rows(probe, pad, batch, prompts, probe.not_reached)


def pad_rows(pairs: list[tuple[list[int], list[int]]], pad: int) -> TensorDict:
    """Prompts and responses as a batch: prompts padded on the left, responses on the right."""
    width = max(len(prompt) for prompt, _ in pairs)
    room = max(len(response) for _, response in pairs)
    ids = torch.full((len(pairs), width + room), pad)
    mask = torch.zeros_like(ids)
    for row, (prompt, response) in enumerate(pairs):
        start = width - len(prompt)
        ids[row, start : width + len(response)] = torch.tensor(prompt + response)
        mask[row, start : width + len(response)] = 1
    return TensorDict(
        {
            "input_ids": ids,
            "attention_mask": mask,
            "position_ids": position_ids_from_mask(mask),
            "response_mask": mask[:, width:].clone(),
        },
        batch_size=[len(pairs)],
    )


def first_difference(got: Tensor, want: Tensor, mask: Tensor, tolerance: float) -> str:
    """Where two (B, R) results differ first beyond the tolerance, or most where they do not."""
    apart = torch.where(mask != 0, (got.double() - want.double()).abs(), 0.0).nan_to_num(nan=float("inf"))
    beyond = (apart > tolerance).nonzero()
    row, column = beyond[0].tolist() if len(beyond) else divmod(int(apart.argmax()), apart.shape[1])
    share = f", {len(beyond)} of {int((mask != 0).sum())} tokens beyond" if len(beyond) else ""
    pair = f"{float(got[row, column]):.6g} against {float(want[row, column]):.6g}"
    return f"row {row}, response token {column}: {pair}{share}"
