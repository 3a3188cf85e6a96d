"""From a batch to what a reward function sees: text, reference and origin of each response."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from verl.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from verl.protocol import DataProto


@dataclass(frozen=True)
class Sample:
    """One response with what is needed to score it.

    Attributes:
        prompt: the prompt's text, without special tokens.
        response: the response's text up to its last valid token, without special tokens; tool output included.
        length: valid response tokens.
        data_source: which rule applies.
        ground_truth: the reference, from ``reward_model["ground_truth"]``.
        extra_info: the row's ``extra_info``.
    """

    prompt: str
    response: str
    length: int
    data_source: str
    ground_truth: Any
    extra_info: Mapping[str, Any]


def decode_samples(data: DataProto, tokenizer: PreTrainedTokenizerBase, reward_fn_key: str) -> list[Sample]:
    """Decode the responses of a batch.

    Args:
        data: needs the tensors ``prompts`` (B,P), ``responses`` (B,R), ``attention_mask`` (B,P+R) and, per sample,
            ``reward_model`` with a ``ground_truth`` and the column named by ``reward_fn_key``.

    Raises:
        DataError: a field or a ground truth is missing.
    """
    prompts, responses = data.batch["prompts"].cpu(), data.batch["responses"].cpu()
    attention = data.batch["attention_mask"].cpu().bool()
    width = prompts.shape[1]
    fields = data.non_tensor_batch
    for name in ("reward_model", reward_fn_key):
        if name not in fields:
            raise DataError(
                f"the batch has no {name!r}, which the reward needs; add this column to the data files "
                f"(the batch has {', '.join(map(repr, fields)) or 'no such fields'})"
            )
    prompt_ids = [row[mask].tolist() for row, mask in zip(prompts, attention[:, :width], strict=True)]
    response_ids = [row[mask].tolist() for row, mask in zip(responses, attention[:, width:], strict=True)]
    prompt_texts = tokenizer.batch_decode(prompt_ids, skip_special_tokens=True)
    response_texts = tokenizer.batch_decode(response_ids, skip_special_tokens=True)
    extras = fields.get("extra_info", [None] * len(response_ids))
    turns = fields.get("__num_turns__")
    samples = []
    for index, ids in enumerate(response_ids):
        reference = fields["reward_model"][index]
        if not isinstance(reference, Mapping) or "ground_truth" not in reference:
            raise DataError(f"sample {index}: reward_model={reference!r} has no 'ground_truth'; the reward needs one")
        extra = dict(extras[index] or {})
        if turns is not None:
            extra["num_turns"] = turns[index]
        samples.append(
            Sample(
                prompt=prompt_texts[index],
                response=response_texts[index],
                length=len(ids),
                data_source=fields[reward_fn_key][index],
                ground_truth=reference["ground_truth"],
                extra_info=extra,
            )
        )
    return samples


def valid_response_mask(data: DataProto) -> torch.Tensor:
    """The batch's ``response_mask`` (B,R), or the response part of its attention mask if it has none."""
    if "response_mask" in data.batch:
        return data.batch["response_mask"]
    return data.batch["attention_mask"][:, -data.batch["responses"].shape[1] :]


def last_scored_position(data: DataProto) -> torch.Tensor:
    """Column (B,) of the token that carries a response's score; -1 for an empty response.

    That is the last token which the policy sampled, if the batch has a ``response_mask`` (a response may end in tool
    output, where no loss would see the score), else the last valid token.
    """
    mask = valid_response_mask(data).bool()
    columns = torch.arange(mask.shape[1], device=mask.device).expand(mask.shape)
    return torch.where(mask, columns, torch.full_like(columns, -1)).amax(dim=1)
