"""From a batch to what a reward function sees: text, reference and origin of each response."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch

from verl.errors import DataError
from verl.trajectories import uncollate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from verl.protocol import DataProto


#: columns of agent loops -> their name in the ``extra_info`` that a reward function is given
AGENT_COLUMNS = {
    "__num_turns__": "num_turns",
    "tool_rewards": "tool_rewards",
    "tool_call_counts": "tool_call_counts",
    "interaction_rewards": "interaction_rewards",
    "player": "player",
}


@dataclass(frozen=True)
class Tokens:
    """The tokens of a sample, which become text when somebody reads it.

    Attributes:
        tokenizer: decodes them.
        prompt: without padding.
        response: all of it, without padding.
        turns: the parts of the response that the policy wrote.
    """

    tokenizer: PreTrainedTokenizerBase
    prompt: Sequence[int]
    response: Sequence[int]
    turns: Sequence[Sequence[int]]

    def text(self, ids: Sequence[int]) -> str:
        """Without special tokens."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))


class Sample:
    """One response with what is needed to score it; its texts are decoded when they are first read.

    Attributes:
        length: valid response tokens, those of tools included.
        data_source: which rule applies.
        ground_truth: the reference, from ``reward_model["ground_truth"]``; None where the row gives none.
        extra_info: the row's ``extra_info``.
    """

    def __init__(
        self,
        prompt: str | None = None,
        response: str | None = None,
        length: int = 0,
        data_source: str = "",
        ground_truth: Any = None,
        extra_info: Mapping[str, Any] | None = None,
        full_response: str | None = None,
        *,
        tokens: Tokens | None = None,
    ) -> None:
        self.length = length
        self.data_source = data_source
        self.ground_truth = ground_truth
        self.extra_info: Mapping[str, Any] = {} if extra_info is None else extra_info
        self._tokens = tokens
        given = {"prompt": prompt, "response": response, "full_response": full_response}
        self.__dict__.update({name: text for name, text in given.items() if text is not None})

    @cached_property
    def prompt(self) -> str:
        """The prompt's text, without special tokens."""
        return "" if self._tokens is None else self._tokens.text(self._tokens.prompt)

    @cached_property
    def response(self) -> str:
        """What the policy wrote, without special tokens; its turns are separated by line breaks."""
        return "" if self._tokens is None else "\n".join(map(self._tokens.text, self._tokens.turns))

    @cached_property
    def full_response(self) -> str:
        """The response's text with what tools and the environment said in between."""
        tokens = self._tokens
        if tokens is None or (len(tokens.turns) == 1 and len(tokens.turns[0]) == len(tokens.response)):
            return self.response
        return tokens.text(tokens.response)


def make_sample(
    tokenizer: PreTrainedTokenizerBase,
    *,
    prompt_ids: Sequence[int],
    response_ids: Sequence[int],
    response_mask: Sequence[int] | None,
    row: Mapping[str, Any],
    reward_fn_key: str = "data_source",
) -> Sample:
    """The sample of one finished response, before it is part of a batch.

    Args:
        tokenizer: decodes.
        prompt_ids: the prompt without padding.
        response_ids: the response without padding.
        response_mask: 1 where the policy wrote the token; ``None`` = everywhere.
        row: the data set's row: ``reward_model``, the data source, ``extra_info``.
        reward_fn_key: field of the row that names the data source.

    Raises:
        DataError: a field is missing.
    """
    ids = list(response_ids)
    mask = [1] * len(ids) if response_mask is None else list(response_mask)
    tokens = Tokens(tokenizer, list(prompt_ids), ids, policy_turns(ids, mask))
    return _sample(tokens, row, reward_fn_key, "the sample")


def policy_turns(ids: Sequence[int], mask: Sequence[int]) -> list[list[int]]:
    """The runs of tokens that the policy wrote."""
    if all(mask):
        return [list(ids)] if ids else []
    runs = groupby(zip(ids, mask, strict=True), key=lambda pair: bool(pair[1]))
    return [[token for token, _ in run] for written, run in runs if written]


def _sample(tokens: Tokens, row: Mapping[str, Any], reward_fn_key: str, what: str) -> Sample:
    reference = row.get("reward_model")
    if not isinstance(reference, Mapping):
        raise DataError(f"{what}: reward_model={reference!r} is no mapping with 'ground_truth'; the reward needs one")
    extra = dict(row.get("extra_info") or {})
    for column, name in AGENT_COLUMNS.items():
        if row.get(column) is not None:
            extra[name] = row[column]
    return Sample(
        length=len(tokens.response),
        data_source=row[reward_fn_key],
        ground_truth=reference.get("ground_truth"),  # what may be missing is for the function's rule to say
        extra_info=extra,
        tokens=tokens,
    )


def decode_samples(data: DataProto, tokenizer: PreTrainedTokenizerBase, reward_fn_key: str) -> list[Sample]:
    """The samples of a batch; their texts are decoded when they are read.

    Args:
        data: needs the tensors ``prompts`` (B,P), ``responses`` (B,R), ``attention_mask`` (B,P+R) and, per sample,
            ``reward_model`` with a ``ground_truth`` and the column named by ``reward_fn_key``. Where ``response_mask``
            (B,R) is 0, the policy did not write the token; without it, everything valid is the policy's.

    Raises:
        DataError: a field is missing.
    """
    fields = data.non_tensor_batch
    for name in ("reward_model", reward_fn_key):
        if name not in fields:
            raise DataError(
                f"the batch has no {name!r}, which the reward needs; add this column to the data files "
                f"(the batch has {', '.join(map(repr, fields)) or 'no such fields'})"
            )
    columns = [name for name in ("reward_model", reward_fn_key, "extra_info", *AGENT_COLUMNS) if name in fields]
    samples = []
    for index, segment in enumerate(uncollate(data.batch)):
        turns = policy_turns(segment.response_ids, segment.sampled)
        tokens = Tokens(tokenizer, segment.prompt_ids, segment.response_ids, turns)
        row = {name: fields[name][index] for name in columns}
        samples.append(_sample(tokens, row, reward_fn_key, f"sample {index}"))
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
