"""Between a batch of the controller and the requests and completions of a rollout engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from verl.errors import DataError, SchemaError
from verl.models.vision import prompt_images
from verl.protocol import DataProto
from verl.trajectories import Segment, collate
from verl.utils.metrics import MetricSet, msum
from verl.utils.seeding import derive_seed
from verl.workers.rollout.types import Completion, GenerationRequest, SamplingParams

if TYPE_CHECKING:
    from verl.config import RolloutConfig


def requests_from_batch(
    prompts: DataProto, rollout_config: RolloutConfig, *, seed: int, step: int, validate: bool
) -> list[GenerationRequest]:
    """One request per row.

    A row's seed derives from the run's seed, the purpose, the step and the row's ``sample_index``, so a sample does
    not depend on how the batch was split over ranks.

    Args:
        prompts: ``input_ids`` and ``attention_mask`` (B,P), left-padded; ``sample_index`` (B,) int64 numbers the
            samples of the whole step (the row number when absent); ``greedy`` (B,) bool, if there, marks rows that
            get the most probable tokens whatever the configuration; ``born_step`` (B,) int64, if there, is the step in
            which a sample was begun, and takes the place of ``step``; ``multi_modal_inputs`` (B,) object, if there,
            holds the images of the prompts.
        rollout_config: the ``rollout`` section.
        seed: seed of the run.
        step: training step.
        validate: sample as ``val_kwargs`` says.

    Raises:
        SchemaError: a field is missing or a prompt is not left-padded.
    """
    batch = prompts.batch
    fields = set() if batch is None else set(batch.keys())
    missing = [name for name in ("input_ids", "attention_mask") if name not in fields]
    if missing:
        raise SchemaError(f"generation needs the fields {missing}; the batch has {sorted(fields)}")
    input_ids, mask = batch["input_ids"], batch["attention_mask"].bool()
    size, width = input_ids.shape
    lengths = mask.sum(1)
    columns = torch.arange(width, device=mask.device)
    if not torch.equal(mask, columns >= (width - lengths).unsqueeze(1)):
        raise SchemaError("attention_mask of the prompts must be left-padded: zeros, then ones to the end of the row")
    index = batch["sample_index"].tolist() if "sample_index" in fields else list(range(size))
    sampled = sampling_settings(rollout_config, validate=validate)
    greedy = batch["greedy"].tolist() if "greedy" in fields else [False] * size
    purpose = "validation" if validate else "rollout"
    column = prompts.non_tensor_batch.get("multi_modal_inputs")
    images = prompt_images([None] * size if column is None else list(column))
    steps = batch["born_step"].tolist() if "born_step" in fields else [step] * size
    return [
        GenerationRequest(
            prompt_ids=row[width - length :],
            sampling=SamplingParams(
                seed=derive_seed(seed, purpose, begun, sample), **(sampled | {"temperature": 0.0} if top else sampled)
            ),
            request_id=f"{purpose}-{begun}-{sample}-{number}",
            images=shown,
        )
        for number, (row, length, sample, top, begun, shown) in enumerate(
            zip(input_ids.tolist(), lengths.tolist(), index, greedy, steps, images, strict=True)
        )
    ]


def sampling_settings(rollout_config: RolloutConfig, *, validate: bool) -> dict[str, Any]:
    """The arguments of :class:`SamplingParams` that a configuration stands for, without the seed."""
    source = rollout_config.val_kwargs if validate else rollout_config
    return {
        "max_tokens": rollout_config.response_length,
        "temperature": float(source.temperature) if source.do_sample else 0.0,
        "top_p": float(source.top_p),
        "top_k": int(source.top_k),
        "repetition_penalty": float(source.repetition_penalty),
        "ignore_eos": bool(rollout_config.ignore_eos),
    }


def batch_from_completions(
    prompts: DataProto, completions: Sequence[Completion], response_length: int, pad_token_id: int
) -> DataProto:
    """The rollout's fields, row by row in the order of ``prompts``.

    Args:
        prompts: ``input_ids`` and ``attention_mask`` (B,P), left-padded.
        completions: one per row, at most ``response_length`` tokens each.
        response_length: R.
        pad_token_id: fills ``responses`` after the last token.

    Returns:
        ``prompts`` (B,P), ``responses`` (B,R) int64, ``input_ids``, ``attention_mask``, ``position_ids`` (B,P+R) int64,
        ``response_mask`` (B,R) int64 from the lengths, ``rollout_log_probs`` (B,R) float32 (0 where the mask is 0),
        ``policy_version`` (B,2) int32: versions of the first and the last token's weights, ``overlong`` (B,) bool.

    Raises:
        DataError: the number of completions or a length does not fit.
    """
    prompt_ids = prompts.batch["input_ids"].cpu()
    prompt_mask = prompts.batch["attention_mask"].cpu().to(torch.int64)
    size = prompt_ids.shape[0]
    if len(completions) != size:
        raise DataError(f"{len(completions)} completions for {size} prompts; the engine must answer every request once")
    lengths = np.fromiter((len(completion.token_ids) for completion in completions), np.int64, size)
    if size and lengths.max() > response_length:
        row = int(lengths.argmax())
        raise DataError(
            f"completion {row} has {lengths[row]} tokens, more than the response length {response_length}; "
            "set max_tokens of the request to the response length"
        )
    fields = collate(
        [
            Segment(
                (),
                item.token_ids,
                log_probs=item.log_probs,
                policy_versions=(
                    item.policy_version,
                    item.policy_version if item.last_policy_version is None else item.last_policy_version,
                ),
                overlong=item.finish_reason == "length",
            )
            for item in completions
        ],
        response_length=response_length,
        pad_token_id=pad_token_id,
        prompts=(prompt_ids, prompt_mask),
    )
    del fields["token_versions"]  # the range says enough
    return DataProto.from_dict(tensors=fields)


class EventCounts:
    """Turns counters of rollout engines, which only grow, into metrics of batches."""

    def __init__(self) -> None:
        self._seen: dict[str, dict[str, int]] = {}

    def add_to(self, answers: DataProto, counters: Mapping[str, Mapping[str, int]]) -> DataProto:
        """Give a generated batch what the counters have gained since the batch before, as ``meta_info["metrics"]``.

        Args:
            answers: the batch.
            counters: by engine, see :meth:`RolloutEngine.counters`. One that begins anew has been restarted.
        """
        metrics = MetricSet()
        for engine, values in counters.items():
            before = self._seen.get(engine, {})
            for name, value in values.items():
                gained = value - before.get(name, 0)
                metrics.merge({f"rollout/{name}": msum(value if gained < 0 else gained)})
            self._seen[engine] = dict(values)
        if metrics:
            answers.meta_info["metrics"] = metrics
        return answers


def pop_metrics(answers: DataProto) -> dict[str, float]:
    """Take what :class:`EventCounts` gave a batch out of it."""
    metrics: MetricSet = answers.meta_info.pop("metrics", MetricSet())
    return metrics.values_by_name()
