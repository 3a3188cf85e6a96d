"""Segments as padded tensors and back: the only place that lays out the tokens of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.errors import DataError
from verl.trajectories.types import Segment


def collate(
    segments: Sequence[Segment],
    *,
    response_length: int,
    pad_token_id: int,
    prompt_length: int | None = None,
    prompts: tuple[Tensor, Tensor] | None = None,
) -> dict[str, Tensor]:
    """One row for each segment: prompts padded on the left, responses on the right.

    Args:
        segments: B rows.
        response_length: R.
        pad_token_id: fills both.
        prompt_length: P.
        prompts: instead of P and the prompts of the segments: ids and mask (B,P), left-padded.

    Returns:
        ``prompts`` (B,P), ``responses`` (B,R) int64, ``input_ids``, ``attention_mask``, ``position_ids`` (B,P+R) int64,
        ``response_mask`` (B,R) int64, ``rollout_log_probs`` (B,R) float32 (0 where the mask is 0), ``policy_version``
        (B,2) int32, ``token_versions`` (B,R) int32 (-1 where the mask is 0), ``overlong`` (B,) bool.

    Raises:
        DataError: a segment is longer than the batch allows.
    """
    size = len(segments)
    if prompts is None:
        assert prompt_length is not None
        prompt_ids, shown = _padded([one.prompt_ids for one in segments], prompt_length, pad_token_id, "prompt")
        prompts = torch.from_numpy(prompt_ids), torch.from_numpy(shown.astype(np.int64))
    responses, inside = _padded([one.response_ids for one in segments], response_length, pad_token_id, "response")
    mask = inside.astype(np.int64)
    log_probs = np.zeros((size, response_length), np.float32)
    versions = np.full((size, response_length), -1, np.int32)
    for row, one in enumerate(segments):
        count = len(one.response_ids)
        if one.response_mask is not None:
            mask[row, :count] = one.response_mask
        if one.log_probs is not None:
            log_probs[row, :count] = one.log_probs
        oldest = -1 if one.policy_versions is None else one.policy_versions[0]
        versions[row, :count] = oldest if one.token_versions is None else one.token_versions
    sampled = torch.from_numpy(mask)
    given = torch.from_numpy(responses)
    attention_mask = torch.cat([prompts[1], torch.from_numpy(inside.astype(np.int64))], dim=1)
    ranges = [(-1, -1) if one.policy_versions is None else one.policy_versions for one in segments]
    overlong = [len(one.response_ids) >= response_length if one.overlong is None else one.overlong for one in segments]
    return {
        "prompts": prompts[0],
        "responses": given,
        "input_ids": torch.cat([prompts[0], given], dim=1),
        "attention_mask": attention_mask,
        "position_ids": position_ids_from_mask(attention_mask),
        "response_mask": sampled,
        "rollout_log_probs": torch.where(sampled.bool(), torch.from_numpy(log_probs), 0.0),
        "policy_version": torch.tensor(ranges, dtype=torch.int32).reshape(size, 2),
        "token_versions": torch.where(sampled.bool(), torch.from_numpy(versions), -1),
        "overlong": torch.tensor(overlong, dtype=torch.bool),
    }


def uncollate(batch: Any) -> list[Segment]:
    """The tokens of a batch without padding, the inverse of :func:`collate`: prompts, responses and masks alone.

    Args:
        batch: ``prompts`` (B,P), ``responses`` (B,R), ``attention_mask`` (B,P+R), and ``response_mask`` (B,R) if the
            policy did not write all tokens of the responses.
    """
    prompts, responses = batch["prompts"].cpu().numpy(), batch["responses"].cpu().numpy()
    width = prompts.shape[1]
    attention = batch["attention_mask"].cpu().bool().numpy()
    written = batch["response_mask"].cpu().bool().numpy() if "response_mask" in batch else attention[:, width:]
    return [
        Segment(prompt[there[:width]].tolist(), response[there[width:]].tolist(), mask[there[width:]].tolist())
        for prompt, response, there, mask in zip(prompts, responses, attention, written, strict=True)
    ]


def position_ids_from_mask(attention_mask: Tensor) -> Tensor:
    """Positions (B,S) that count the attended tokens from 0; left padding gets 0."""
    return (attention_mask.cumsum(dim=1) - 1).clamp_(min=0)


def check_lengths(segments: Sequence[Segment], prompt_length: int, response_length: int) -> None:
    """Raise :class:`DataError` if a segment is longer than the batch allows."""
    for one in segments:
        for what, ids, width in (
            ("prompt", one.prompt_ids, prompt_length),
            ("response", one.response_ids, response_length),
        ):
            if len(ids) > width:
                raise DataError(_too_long(what, len(ids), width))


def _padded(rows: Sequence[Sequence[int]], width: int, fill: int, what: str) -> tuple[np.ndarray, np.ndarray]:
    """The ids (B, width) int64, prompts on the right and responses on the left, and where they are, bool."""
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    if len(rows) and lengths.max() > width:
        raise DataError(_too_long(what, int(lengths.max()), width))
    columns = np.arange(width)
    inside = columns >= width - lengths[:, None] if what == "prompt" else columns < lengths[:, None]
    out = np.full((len(rows), width), fill, np.int64)
    out[inside] = np.fromiter((token for row in rows for token in row), np.int64, int(lengths.sum()))
    return out, inside


def _too_long(what: str, count: int, width: int) -> str:
    return f"a {what} has {count} tokens, more than data.max_{what}_length={width}"
