"""The running batch: prefill, decode steps, and rows that come and go."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import torch
from torch import nn

from verl.errors import RolloutError
from verl.models.vision import ImageTokens, PromptImages, embed, joined_images
from verl.workers.rollout.base import Completion, FinishReason
from verl.workers.rollout.hf.attention import ForwardContext, forward_context
from verl.workers.rollout.hf.kv_cache import RolloutCache
from verl.workers.rollout.hf.rows import RowState
from verl.workers.rollout.hf.sampler import SamplingBatch, sample
from verl.workers.rollout.hf.scheduler import PromptGroup, Sequence, split_for_prefill
from verl.workers.rollout.hf.uniforms import uniforms

#: FLOP that the device could do in the time that a layer's operations take to start: what a forward costs however
#: few tokens it has. Decides how much padding is worth a saved forward, and when finished rows are moved out.
_OVERHEAD_FLOP_PER_LAYER = {"cpu": 5e7, "cuda": 5e10}
#: starting the copies that move rows, in forwards
_COMPACTION_COST = 0.5

FinishedSequence = tuple[Sequence, Completion]


class BatchRunner:
    """Runs sequences through the model together.

    All rows share the column of the next token. A row that starts late, or has a shorter prompt, has fewer columns
    behind it; :class:`~verl.workers.rollout.hf.attention.ForwardContext` hides the others. What belongs to a token
    (id, log-probability, uniform number) is stored in the token's column.

    Args:
        module: the model.
        cache: its cache.
        device: where both live.
        eos_token_ids: tokens that end a completion.
        vocab_size: rows of the embedding.
        max_prefill_tokens: most padded tokens of one prefill forward.
        image_tokens: how the model reads images; None: not at all.
    """

    def __init__(
        self,
        module: nn.Module,
        cache: RolloutCache,
        *,
        device: torch.device,
        dtype: torch.dtype,
        eos_token_ids: Iterable[int],
        vocab_size: int,
        max_prefill_tokens: int,
        image_tokens: ImageTokens | None = None,
    ) -> None:
        self.module = module
        self.image_tokens = image_tokens
        self.cache = cache
        self.device = device
        self.dtype = dtype
        self.eos_token_ids = frozenset(eos_token_ids)
        self.vocab_size = vocab_size
        self.max_prefill_tokens = max_prefill_tokens
        parameters = sum(parameter.numel() for parameter in module.parameters())
        overhead = _OVERHEAD_FLOP_PER_LAYER.get(device.type, 5e10) * cache.num_layers
        self.forward_cost = overhead / (2 * max(parameters, 1))  # in tokens
        self._wasted = 0  # tokens computed for finished rows since the last compaction
        self._stop_tables: dict[frozenset[int], int] = {}
        self._stop_table = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)
        self.rows: list[Sequence | None] = []  # None: finished, not yet moved out
        self._live = 0
        self._column = 0
        self._first_column = 0
        self._same_start = True
        self._longest = 0
        self._state = RowState.allocate(0, 0, dtype, device)
        self.forward_tokens = 0  # tokens computed by forwards, padding included

    # -- membership

    @property
    def running(self) -> int:
        """Sequences in the batch that have not finished."""
        return self._live

    @property
    def columns_needed(self) -> int:
        """Columns that the cache has to span for the sequences in the batch."""
        return self._longest if self._live else 0

    @torch.inference_mode()
    def admit(self, groups: Seq[PromptGroup]) -> list[FinishedSequence]:
        """Prefill the groups' prompts, sample their first tokens; returns sequences that end with it."""
        if not self._live:
            self.rows.clear()
        elif len(self.rows) > self._live:
            self._compact()
        incoming = [member for group in groups for member in group.members]
        self._make_room(incoming)
        column = self._column
        start_row = len(self.rows)
        logits: list[torch.Tensor] = []
        for piece in split_for_prefill(list(groups), self.max_prefill_tokens, self.forward_cost):
            logits.append(self._prefill(piece))
        live = len(self.rows)
        self._live = live
        new = self.rows[start_row:]
        entered = [sequence for sequence in new if sequence is not None]
        seeds = [_seed_of(item.request.sampling.seed) for item in entered]
        count, passed = max(item.budget for item in entered), [item.request.sampled for item in entered]
        drawn = torch.from_numpy(uniforms(seeds, count, passed)).to(self.device)
        self._state.uniform[start_row:live, column : column + count] = drawn
        last = torch.tensor([column + item.budget - 1 for item in entered], device=self.device)
        self._state.last_column[start_row:live] = last
        self._state.stop_set[start_row:live] = torch.tensor(
            [self._stop_index(item.request.sampling) for item in entered], device=self.device
        )
        self._state.note_contexts(start_row, [item.penalised_ids for item in entered], self.vocab_size)
        self._state.alive[start_row:live] = True
        self._membership_changed()
        joined = torch.cat(logits) if len(logits) > 1 else logits[0]
        settings = self._settings.rows(start_row, live) if start_row else self._settings
        return self._take_tokens(joined, settings, start_row, live)

    @torch.inference_mode()
    def step(self) -> list[FinishedSequence]:
        """Compute one more token for every row; returns the sequences that ended."""
        column, live, first = self._column, len(self.rows), self._first_column
        bias = None
        if not self._same_start:
            bias = self._state.pad_bias[:live, first : column + 1].view(live, 1, 1, column + 1 - first)
        # rows that have finished run on until they are moved out; their positions must not leave the model's range
        positions = (column - self._state.start[:live]).clamp_(max=self._longest - 1)
        if self.image_tokens is not None:
            positions = positions + self._state.ahead[:live]
        self.cache.plan_decode(column, first, live)
        logits = self._forward(
            {"input_ids": self._state.tokens[:live, column : column + 1]},
            positions.unsqueeze(1),
            ForwardContext(True, bias),
        )
        self._column = column + 1
        finished = self._take_tokens(logits, self._settings, 0, live)
        self._wasted += len(self.rows) - self._live
        if self._live == 0:
            self.rows.clear()
        elif self._wasted > _COMPACTION_COST * self.forward_cost:
            # as much was wasted as moving costs: never worse than twice the best moment, without knowing the future
            self._compact()
        return finished

    @torch.inference_mode()
    def abort(self, unwanted: Callable[[Sequence], bool]) -> list[FinishedSequence]:
        """End sequences now, with the tokens they have."""
        rows = [row for row, sequence in enumerate(self.rows) if sequence is not None and unwanted(sequence)]
        finished = self._finish(rows, ["abort"] * len(rows)) if rows else []
        if self._live == 0:
            self.rows.clear()
        return finished

    def reset(self) -> None:
        """Forget all rows."""
        self.rows.clear()
        self._live = 0

    def release(self) -> None:
        """Give back the memory of the cache and of everything that has its shape."""
        self.reset()
        self.cache.release()
        self._state = RowState.allocate(0, 0, self.dtype, self.device)

    # -- forwards

    def _forward(
        self, given: Mapping[str, torch.Tensor], position_ids: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """Logits (B, V) behind the last token.

        Args:
            given: ``input_ids`` (B, L) or ``inputs_embeds`` (B, L, H).
            position_ids: (B, L), or (3, B, L) where images are read.
            context: what forward this is.
        """
        self.forward_tokens += position_ids.shape[-2] * position_ids.shape[-1]
        with forward_context(context):
            out: Any = self.module(**given, position_ids=position_ids, past_key_values=self.cache, use_cache=True)
        logits: torch.Tensor = out.logits[:, -1]
        return logits

    def _prefill(self, groups: Seq[PromptGroup]) -> torch.Tensor:
        """Fill new rows at the end of the batch; returns the logits after each row's prompt, (rows, V)."""
        column, first_row = self._column, len(self.rows)
        lengths = [len(group.context_ids) for group in groups]
        longest = lengths[0]
        ids = np.zeros((len(groups), longest), np.int64)
        for row, group in enumerate(groups):
            ids[row, : lengths[row]] = group.context_ids
        runs: list[tuple[int, int, int]] = []
        source: list[int] = []
        for index, group in enumerate(groups):
            begin = first_row + len(source)
            source += [index] * len(group.members)
            for member in group.members:
                member.first_column = column
                self.rows.append(member)
            if runs and runs[-1][2] == lengths[index]:
                runs[-1] = (runs[-1][0], begin + len(group.members), lengths[index])
            else:
                runs.append((begin, begin + len(group.members), lengths[index]))
        rows = torch.tensor(source, device=self.device) if len(source) > len(groups) else None
        for begin, end, length in runs:
            self._state.start[begin:end] = column - length
            self._state.ahead[begin:end] = 0
            self._state.pad_bias[begin:end, : column - length] = float("-inf")
            self._state.pad_bias[begin:end, column - length :] = 0.0
        self.cache.plan_prefill(column, (first_row, len(self.rows)), runs, rows)
        last_index = torch.tensor(lengths, device=self.device) - 1
        positions = torch.arange(longest, device=self.device).expand(len(groups), longest)
        given = {"input_ids": torch.from_numpy(ids).to(self.device)}
        if any(group.images is not None for group in groups):
            given, positions, ahead = self._with_images(groups, ids)
            self._state.ahead[first_row : len(self.rows)] = ahead if rows is None else ahead.index_select(0, rows)
        logits = self._forward(given, positions, ForwardContext(False, last_index=last_index))
        return logits if rows is None else logits.index_select(0, rows)

    def _with_images(
        self, groups: Seq[PromptGroup], ids: np.ndarray
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
        """Model input of contexts with images.

        Args:
            groups: whose contexts they are.
            ids: (B, L) contexts, padded on the right.

        Returns:
            ``inputs_embeds`` (B, L, H), positions (3, B, L), and (B,) what positions behind a context are ahead of the
            number of tokens.
        """
        assert self.image_tokens is not None
        positions = np.broadcast_to(np.arange(ids.shape[1]), (3, *ids.shape)).copy()
        places = np.zeros(ids.shape, bool)
        ahead = np.zeros(len(groups), np.int64)
        shown: list[PromptImages] = []
        for row, group in enumerate(groups):
            if group.images is not None:
                length = len(group.context_ids)
                images = group.images
                found, at, ahead[row] = self.image_tokens.positions(
                    ids[row, :length], images.grid_thw.numpy(), images.starts
                )
                positions[:, row, :length] = found
                places[row, at] = True
                shown.append(group.images)
        inputs = joined_images(shown, np.flatnonzero(places)).to(self.device)
        on_device = [torch.from_numpy(array).to(self.device) for array in (ids, positions, ahead)]
        embeds = embed(self.module.base_model, self.image_tokens, on_device[0], inputs)
        return {"inputs_embeds": embeds}, on_device[1], on_device[2]

    def _take_tokens(
        self, logits: torch.Tensor, settings: SamplingBatch, start: int, stop: int
    ) -> list[FinishedSequence]:
        """Sample the current column of rows ``[start, stop)`` and end what is done."""
        column = self._column
        seen = None if settings.repetition_penalty is None else self._state.seen[start:stop]
        tokens, log_probs = sample(logits, settings, self._state.uniform[start:stop, column], seen)
        if seen is not None:
            seen.scatter_(1, tokens.unsqueeze(1), True)
        self._state.tokens[start:stop, column] = tokens
        self._state.log_probs[start:stop, column] = log_probs
        if len(self._stop_tables) == 1:
            stopped = self._stop_table[0][tokens]
        else:
            stopped = self._stop_table[self._state.stop_set[start:stop], tokens]
        ended = (stopped | (self._state.last_column[start:stop] <= column)) & self._state.alive[start:stop]
        if not bool(ended.any()):
            return []
        offsets = ended.nonzero().squeeze(1)
        reasons: list[FinishReason] = ["stop" if flag else "length" for flag in stopped[offsets].tolist()]
        return self._finish((offsets + start).tolist(), reasons)

    def _finish(self, rows: list[int], reasons: Seq[FinishReason]) -> list[FinishedSequence]:
        index = torch.tensor(rows, device=self.device)
        self._state.alive[index] = False
        members = [self.rows[row] for row in rows]
        begin = min(member.first_column for member in members if member is not None)
        end = self._column + 1
        tokens = self._state.tokens[:, begin:end].index_select(0, index).tolist()
        log_probs = self._state.log_probs[:, begin:end].index_select(0, index).tolist()
        finished: list[FinishedSequence] = []
        for row, member, reason, ids, values in zip(rows, members, reasons, tokens, log_probs, strict=True):
            assert member is not None
            offset = member.first_column - begin
            values = values[offset:]
            if not math.isfinite(sum(values)):
                raise RolloutError(
                    f"request {member.request.request_id!r}: the model's logits are not finite after "
                    f"{len(values)} tokens; the policy's weights have diverged or were not loaded correctly"
                )
            finished.append((member, Completion(ids[offset:], values, reason)))
            self.rows[row] = None
        self._live -= len(rows)
        return finished

    # -- room and order

    def _make_room(self, incoming: Seq[Sequence]) -> None:
        """Have rows and columns for the batch plus ``incoming``, which are prefilled at the current column."""
        live, column, first = self._live, self._column, self._first_column
        prompt = max(sequence.context_length for sequence in incoming)
        remaining = max(sequence.budget for sequence in incoming)
        used = 0
        if live:
            used = column - first
            ends = [s.first_column + s.budget for s in self.rows if s is not None]
            remaining = max(remaining, max(ends) - column)
            if (
                column >= prompt
                and column + remaining <= self._state.columns
                and live + len(incoming) <= self._state.rows
            ):
                return
        new_column = max(prompt, used)
        rows = live + len(incoming)
        columns = new_column + remaining
        if live:  # moving everything is not free: leave room for a few more admissions
            rows = max(rows, self._state.rows)
            columns = max(columns + remaining // 4, self._state.columns)
        self.cache.relayout(rows, columns, live=live, first_column=first, column=column, new_column=new_column)
        shift = new_column - column
        if not live:
            if (rows, columns) != (self._state.rows, self._state.columns):
                self._state = RowState.allocate(rows, columns, self.dtype, self.device)
            self._first_column = new_column
        elif (rows, columns) != (self._state.rows, self._state.columns) or shift:
            self._state = self._state.relaid(rows, columns, live=live, first_column=first, shift=shift)
            self._first_column = first + shift
        for sequence in self.rows:
            if sequence is not None:
                sequence.first_column += shift
        self._column = new_column

    def _compact(self) -> None:
        """Move rows from the end into the places of finished ones."""
        live = self._live
        holes = [row for row in range(live) if self.rows[row] is None]
        tails = [row for row in range(live, len(self.rows)) if self.rows[row] is not None]
        if holes:
            target = torch.tensor(holes, device=self.device)
            source = torch.tensor(tails, device=self.device)
            self.cache.move_rows(target, source, self._first_column, self._column)
            self._state.move_rows(target, source)
            for hole, tail in zip(holes, tails, strict=True):
                self.rows[hole] = self.rows[tail]
        del self.rows[live:]
        self._wasted = 0
        self._membership_changed()

    def _membership_changed(self) -> None:
        """Recompute what depends on which sequences run; all rows are live here."""
        starts = [s.first_column - s.context_length for s in self.rows if s is not None]
        self._first_column = min(starts)
        self._same_start = self._first_column == max(starts)
        self._longest = max(s.total_length for s in self.rows if s is not None)
        self._settings = SamplingBatch.build([s.request.sampling for s in self.rows if s is not None], self.device)

    def _stop_index(self, params: Any) -> int:
        """Row of the table of stop tokens for a request's set."""
        stop = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stop |= self.eos_token_ids
        index = self._stop_tables.get(stop)
        if index is None:
            index = self._stop_tables[stop] = len(self._stop_tables)
            row = torch.zeros(1, self.vocab_size, dtype=torch.bool, device=self.device)
            for token in stop:
                if 0 <= token < self.vocab_size:
                    row[0, token] = True
            self._stop_table = torch.cat([self._stop_table, row])
        return index


def _seed_of(seed: int | None) -> int:
    return seed % 2**64 if seed is not None else int(np.random.SeedSequence().generate_state(1, np.uint64)[0])
