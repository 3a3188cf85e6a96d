"""From the last hidden states of a Megatron model to log-probs, entropies, values and scores.

Whole logits never exist: each tensor-parallel rank makes those of its part of the vocabulary, for a chunk of tokens at
a time, and context-parallel ranks do so for their slice of the tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from verl.models.heads import place_results
from verl.models.logprobs import LogitTransform
from verl.models.packing import RowLayout
from verl.models.parallel_logprobs import VocabShard, parallel_sum_pi_squared, parallel_token_log_probs
from verl.workers.engine.base import ParallelLayout


class Outputs:
    """The head of a model, on its last stage.

    Args:
        model: the last piece of the model; without an output layer on other stages, where nothing may be asked.
        head: ``"lm"``, ``"value"`` or ``"classifier"``.
        layout: where this rank stands.
        vocab_size: tokens that exist.
        transform: the model's own change to its logits.
        keep: keep log-probs of a chunk for the backward pass.
    """

    def __init__(
        self,
        model: Any,
        *,
        head: str,
        layout: ParallelLayout,
        vocab_size: int,
        transform: LogitTransform,
        keep: bool,
    ) -> None:
        from megatron.core import parallel_state

        self.model = model
        self.head = head
        self.layout = layout
        self.transform = transform
        self.keep = keep
        self._sequence_group: dist.ProcessGroup = parallel_state.get_context_parallel_group()
        if head == "lm" and model.post_process:
            rows = self._weight().shape[0]
            first = layout.tp_rank * rows
            size = max(0, min(rows, vocab_size - first))
            self._vocab = VocabShard(first, size, parallel_state.get_tensor_model_parallel_group())

    def _weight(self) -> Tensor:
        model = self.model
        weight: Tensor = (
            model.shared_embedding_or_output_weight()
            if model.share_embeddings_and_output_weights
            else model.output_layer.weight
        )
        return weight

    def fields(self, hidden: Tensor, rows: RowLayout, want: frozenset[str], temperature: float) -> dict[str, Tensor]:
        """The wanted fields of a micro-batch.

        Args:
            hidden: (1, tokens, H) of this rank.
            rows: where results belong.
            want: names.
            temperature: divides the logits.
        """
        from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

        states = hidden[0]
        if self.model.config.sequence_parallel:
            # what follows is the same on every tensor-parallel rank, and so is its gradient
            states = gather_from_sequence_parallel_region(states, tensor_parallel_output_grad=False)
        if self.head == "classifier":
            if rows.rows == 0:
                return {"scores": self._apply_head(states[:1]).sum(0) * torch.zeros(0, device=states.device)}
            scores = self._at(states, rows.last_index, lambda x, index: self._apply_head(x))
            return {"scores": scores[:, 0] if scores.shape[1] == 1 else scores}
        if self.head == "value":
            values = self._at(states, rows.predict_index, lambda x, index: self._apply_head(x))
            return place_results(rows, {"values": values[:, 0]})
        results = self._at(
            states, rows.predict_index, lambda x, index: self._log_probs(x, rows.targets[index], want, temperature)
        )
        names = ["log_probs", *(name for name in ("entropys", "sum_pi_squared") if name in want)]
        return place_results(rows, dict(zip(names, results.unbind(1), strict=True)))

    def _log_probs(self, states: Tensor, targets: Tensor, want: frozenset[str], temperature: float) -> Tensor:
        """(n, fields) log-probs, and what else is wanted of the distributions."""
        weight = self._weight()
        log_probs, entropies = parallel_token_log_probs(
            states,
            weight,
            targets,
            self._vocab,
            temperature=temperature,
            transform=self.transform,
            entropy="entropys" in want,
            keep=self.keep,
        )
        fields = [log_probs] if entropies is None else [log_probs, entropies]
        if "sum_pi_squared" in want:
            squares = parallel_sum_pi_squared(
                states.detach(), weight, self._vocab, temperature=temperature, transform=self.transform
            )
            fields.append(squares)
        return torch.stack(fields, 1)

    def _apply_head(self, states: Tensor) -> Tensor:
        values: Tensor = self.model.output_layer.apply_head(states)
        return values

    def _at(self, states: Tensor, index: Tensor, compute: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """``compute`` at some positions of the whole sequence, of which context-parallel ranks have a slice each."""
        if self.layout.sp_size == 1:
            everything = torch.arange(len(index), device=index.device)
            return compute(states.index_select(0, index), everything)
        first = self.layout.sp_rank * states.shape[0]
        mine = torch.nonzero((index >= first) & (index < first + states.shape[0]))[:, 0]
        values = compute(states.index_select(0, index[mine] - first), mine)
        whole = values.new_zeros(len(index), *values.shape[1:]).index_copy(0, mine, values)
        return _SumOverRanks.apply(whole, self._sequence_group)


class _SumOverRanks(torch.autograd.Function):
    """Sum of what ranks have; each rank's gradient is for its own part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
