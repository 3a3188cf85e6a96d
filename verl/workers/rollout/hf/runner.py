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
from verl.workers.rollout.hf.attention import ForwardContext, forward_context
from verl.workers.rollout.hf.kv_budget import STRIDE, CacheBudget, Progress
from verl.workers.rollout.hf.kv_cache import RolloutCache
from verl.workers.rollout.hf.prefill import (
    Beginning,
    extension_writes,
    plan_prefill,
    prefill_writes,
    rows_by_prompt,
    split_for_prefill,
)
from verl.workers.rollout.hf.row_state import RowState
from verl.workers.rollout.hf.scheduler import PromptGroup, Sequence
from verl.workers.rollout.sampler import SamplingBatch, sample
from verl.workers.rollout.types import Completion, FinishReason
from verl.workers.rollout.uniforms import uniforms

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

    Where the budget is too small for all that the rows may become, the cache is laid out as wide as the budget allows,
    and :meth:`make_columns` takes rows out when they meet its end.

    Args:
        module: the model.
        cache: its cache.
        budget: most tokens of the cache.
        device: where both live.
        eos_token_ids: tokens that end a completion.
        vocab_size: rows of the embedding.
        max_prefill_tokens: most padded tokens of one prefill forward.
        image_tokens: how the model reads images; None: not at all.
        unsampled: tokens that are never sampled.
    """

    def __init__(
        self,
        module: nn.Module,
        cache: RolloutCache,
        budget: CacheBudget,
        *,
        device: torch.device,
        dtype: torch.dtype,
        eos_token_ids: Iterable[int],
        vocab_size: int,
        max_prefill_tokens: int,
        image_tokens: ImageTokens | None = None,
        unsampled: Seq[int] = (),
    ) -> None:
        self.module = module
        self._unsampled = torch.tensor(unsampled, device=device) if len(unsampled) else None
        self.image_tokens = image_tokens
        self.cache = cache
        self.budget = budget
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
        self.preemptions = 0  # sequences taken out because the cache was full
        self.recomputed_tokens = 0  # tokens computed once more because of that

    # -- membership

    @property
    def running(self) -> int:
        """Sequences in the batch that have not finished."""
        return self._live

    def progress(self) -> list[Progress]:
        """How far each of them is."""
        column = self._column
        return [s.progress(column - s.first_column + 1) for s in self.rows if s is not None]

    @torch.inference_mode()
    def admit(self, groups: Seq[PromptGroup]) -> list[FinishedSequence]:
        """Prefill the groups' contexts, sample their next tokens; returns sequences that end with it."""
        if not self._live:
            self.rows.clear()
        elif len(self.rows) > self._live:
            self._compact()
        moved = self._make_room([member for group in groups for member in group.members])
        start_row = len(self.rows)
        logits = self._fill(groups)
        entered = [sequence for sequence in self.rows[start_row:] if sequence is not None]
        live = self._live = len(self.rows)
        last = [self._column + item.budget - 1 for item in entered]
        self._state.last_column[start_row:live] = torch.tensor(last, device=self.device)
        self._state.stop_set[start_row:live] = torch.tensor(
            [self._stop_index(item.request.sampling) for item in entered], device=self.device
        )
        self._state.note_contexts(start_row, [item.penalised_ids for item in entered], self.vocab_size)
        self._membership_changed()
        self._draw_numbers(0 if moved else start_row)
        settings = self._settings.rows(start_row, live) if start_row else self._settings
        return self._take_tokens(logits, settings, start_row, live)

    @torch.inference_mode()
    def make_columns(self) -> list[Sequence]:
        """Have a column for the next token.

        Returns:
            Sequences that had to leave for it, the last ones admitted; they keep the tokens that they have.
        """
        if not self._live or self._column + 1 < self._state.columns:
            return []
        tokens = self.budget.tokens
        assert tokens is not None
        order = sorted((s.ticket, row) for row, s in enumerate(self.rows) if s is not None)
        leaving: list[int] = []
        while len(order) > 1 and len(order) * self._extent(row for _, row in order)[1] > tokens:
            leaving.append(order.pop()[1])
        taken = self._take_out(leaving) if leaving else []
        for member, ids, log_probs in taken:
            member.put_back(ids, log_probs)
        self.preemptions += len(taken)
        if len(self.rows) > self._live:
            self._compact()
        used, _, most = self._extent(range(self._live))
        self._lay_out(self._live, min(most, tokens // self._live), used, reserve=tokens)
        self._draw_numbers(0)
        return [member for member, _, _ in taken]

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

    def _fill(self, groups: Seq[PromptGroup]) -> torch.Tensor:
        """Fill new rows at the end of the batch; returns the logits after each row's context, (rows, V)."""
        column, first_row = self._column, len(self.rows)
        limit, cost = self.max_prefill_tokens, self.forward_cost
        plan = plan_prefill(groups, rows_by_prompt(self.rows), cost)
        self.recomputed_tokens += plan.recomputed
        pieces = split_for_prefill(plan.beginnings, lambda item: len(item.ids), limit, cost)
        entering = [member for piece in pieces for item in piece for member in item.members]
        entering += [member for member, _ in plan.continued]
        for member in entering:
            member.first_column = column
        self.rows += entering
        place = {id(member): row for row, member in enumerate(entering, start=first_row)}
        self._state.begin(first_row, [column - member.context_length for member in entering])
        for row, member in plan.copies:
            target, start = place[id(member)], int(self._state.start[row])
            length = min(len(member.request.prompt_ids), member.context_length - 1)
            self.cache.copy_prefix(row, start, target, column - member.context_length, length)
            self._state.ahead[target] = self._state.ahead[row]
        logits = [self._prefill(piece, place) for piece in pieces]
        for rest in split_for_prefill(plan.continued, lambda item: item[1], limit, cost):
            logits.append(self._extend([count for _, count in rest], place[id(rest[0][0])]))
        return torch.cat(logits) if len(logits) > 1 else logits[0]

    def _prefill(self, beginnings: Seq[Beginning], place: Mapping[int, int]) -> torch.Tensor:
        """Compute beginnings; returns the logits of their members, which have neighbouring rows, (rows, V).

        Args:
            beginnings: from the longest to the shortest.
            place: row of each sequence, by its ``id``.
        """
        lengths = [len(item.ids) for item in beginnings]
        longest = lengths[0]
        ids = np.zeros((len(beginnings), longest), np.int64)
        source: list[int] = []
        for index, item in enumerate(beginnings):
            ids[index, : lengths[index]] = item.ids
            source += [index] * len(item.members)
        rows = torch.tensor(source, dtype=torch.int64, device=self.device)
        given = {"input_ids": torch.from_numpy(ids).to(self.device)}
        positions = torch.arange(longest, device=self.device).expand(len(beginnings), longest)
        if any(item.images is not None for item in beginnings):
            given, positions, ahead = self._with_images(beginnings, ids)
            for index, item in enumerate(beginnings):
                for member in (*item.members, *item.continued):
                    self._state.ahead[place[id(member)]] = ahead[index]
        self.cache.plan_prefill(prefill_writes(beginnings, place, rows, self._column))
        last_index = torch.tensor(lengths, device=self.device) - 1
        logits = self._forward(given, positions, ForwardContext(False, last_index=last_index))
        return logits if source == list(range(len(beginnings))) else logits.index_select(0, rows)

    def _extend(self, counts: Seq[int], row: int) -> torch.Tensor:
        """Compute the last tokens of contexts whose beginnings are there; returns logits (rows, V).

        Args:
            counts: tokens of each, from the most to the fewest.
            row: of the first one; the others follow.
        """
        column, length = self._column, counts[0]
        rows = slice(row, row + len(counts))
        ids = np.zeros((len(counts), length), np.int64)
        for index, (member, count) in enumerate(zip(self.rows[rows], counts, strict=True)):
            assert member is not None
            ids[index, length - count :] = member.context_ids[-count:]
        start = self._state.start[rows]
        first = int(start.min())
        self.cache.plan_extension(extension_writes(counts, row, column), rows, first, column)
        positions = (torch.arange(column - length, column, device=self.device) - start.unsqueeze(1)).clamp_(min=0)
        if self.image_tokens is not None:
            positions += self._state.ahead[rows].unsqueeze(1)
        last_index = torch.full((len(counts),), length - 1, device=self.device)
        context = ForwardContext(False, last_index=last_index, starts=start - first)
        return self._forward({"input_ids": torch.from_numpy(ids).to(self.device)}, positions, context)

    def _with_images(
        self, beginnings: Seq[Beginning], ids: np.ndarray
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
        """Model input of beginnings with images.

        Args:
            beginnings: what is computed.
            ids: (B, L) their tokens, padded on the right.

        Returns:
            ``inputs_embeds`` (B, L, H), positions (3, B, L), and (B,) what positions behind a context are ahead of the
            number of tokens.
        """
        assert self.image_tokens is not None
        positions = np.broadcast_to(np.arange(ids.shape[1]), (3, *ids.shape)).copy()
        places = np.zeros(ids.shape, bool)
        ahead = np.zeros(len(beginnings), np.int64)
        shown: list[PromptImages] = []
        for row, item in enumerate(beginnings):
            if item.images is not None:
                length = len(item.ids)
                found, at, ahead[row] = self.image_tokens.positions(
                    ids[row, :length], item.images.grid_thw.numpy(), item.images.starts
                )
                positions[:, row, :length] = found
                places[row, at] = True
                shown.append(item.images)
        inputs = joined_images(shown, np.flatnonzero(places)).to(self.device)
        on_device = [torch.from_numpy(array).to(self.device) for array in (ids, positions, ahead)]
        embeds = embed(self.module.base_model, self.image_tokens, on_device[0], inputs)
        return {"inputs_embeds": embeds}, on_device[1], on_device[2]

    def _take_tokens(
        self, logits: torch.Tensor, settings: SamplingBatch, start: int, stop: int
    ) -> list[FinishedSequence]:
        """Sample the current column of rows ``[start, stop)`` and end what is done."""
        column = self._column
        if self._unsampled is not None:
            logits = logits.index_fill(-1, self._unsampled, float("-inf"))
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
        finished: list[FinishedSequence] = []
        for (member, ids, log_probs), reason in zip(self._take_out(rows), reasons, strict=True):
            completion = member.completion(ids, log_probs, reason)
            if not math.isfinite(sum(completion.log_probs)):
                raise RolloutError(
                    f"request {member.request.request_id!r}: the model's logits are not finite after "
                    f"{len(completion.log_probs)} tokens; the policy's weights have diverged or were not loaded "
                    "correctly"
                )
            finished.append((member, completion))
        return finished

    def _take_out(self, rows: Seq[int]) -> list[tuple[Sequence, list[int], list[float]]]:
        """End rows; returns their sequences with the tokens and log-probabilities sampled since they were admitted."""
        index = torch.tensor(rows, device=self.device)
        self._state.alive[index] = False
        members = [member for row in rows if (member := self.rows[row]) is not None]
        begin, end = min(member.first_column for member in members), self._column + 1
        tokens = self._state.tokens[:, begin:end].index_select(0, index).tolist()
        log_probs = self._state.log_probs[:, begin:end].index_select(0, index).tolist()
        for row in rows:
            self.rows[row] = None
        self._live -= len(rows)
        return [
            (member, ids[member.first_column - begin :], values[member.first_column - begin :])
            for member, ids, values in zip(members, tokens, log_probs, strict=True)
        ]

    # -- room and order

    def _extent(self, rows: Iterable[int]) -> tuple[int, int, int]:
        """Columns that rows have used, that they need until the next layout, and that they may need to their ends."""
        column = self._column
        spans = [
            (column - s.first_column + s.context_length, s.first_column + s.budget - column)
            for row in rows
            if (s := self.rows[row]) is not None
        ]
        used = max(behind for behind, _ in spans)
        soon = max(behind + min(STRIDE, ahead) for behind, ahead in spans)
        return used, soon, used + max(ahead for _, ahead in spans)

    def _make_room(self, incoming: Seq[Sequence]) -> bool:
        """Have rows and columns for the batch plus ``incoming``, which are prefilled at the current column.

        Returns:
            Whether the batch was moved.
        """
        used, _, most = self._extent(range(self._live)) if self._live else (0, 0, 0)
        prompt = max(sequence.context_length for sequence in incoming)
        remaining = max(most - used, *(sequence.budget for sequence in incoming))
        rows, new_column = self._live + len(incoming), max(prompt, used)
        columns, limit = new_column + remaining, self.budget.tokens
        tight = limit is not None and rows * columns > limit
        if self._live:
            needed = self._column + (min(STRIDE, remaining) if tight else remaining)
            if self._column >= prompt and needed <= self._state.columns and rows <= self._state.rows:
                return False
            # moving everything is not free: leave room for a few more admissions
            wider = max(columns + remaining // 4, self._state.columns)
            if limit is None or max(rows, self._state.rows) * wider <= limit:
                rows, columns = max(rows, self._state.rows), wider
        if tight:
            assert limit is not None
            self._lay_out(rows, max(limit // rows, new_column + 1), new_column, reserve=limit)
        else:
            self._lay_out(rows, columns, new_column)
        return True

    def _lay_out(self, rows: int, columns: int, new_column: int, *, reserve: int = 0) -> None:
        """Have ``rows`` × ``columns``; the batch moves so that its next token gets ``new_column``."""
        live, column, first = self._live, self._column, self._first_column
        shift = new_column - column
        self.cache.relayout(
            rows, columns, live=live, first_column=first, column=column, new_column=new_column, reserve=reserve
        )
        changed = (rows, columns) != (self._state.rows, self._state.columns)
        if not live:
            if changed:
                self._state = RowState.allocate(rows, columns, self.dtype, self.device)
            self._first_column = new_column
        elif changed or shift:
            self._state = self._state.relaid(rows, columns, live=live, first_column=first, column=column, shift=shift)
            self._first_column = first + shift
        for sequence in self.rows:
            if sequence is not None:
                sequence.first_column += shift
        self._column = new_column

    def _draw_numbers(self, first_row: int) -> None:
        """Draw the random numbers of rows from ``first_row`` on, for the current column and those behind it."""
        column, rows = self._column, [s for s in self.rows[first_row:] if s is not None]
        end = min(self._state.columns, max(s.first_column + s.budget for s in rows))
        passed = [s.sampled + column - s.first_column for s in rows]
        drawn = torch.from_numpy(uniforms([s.seed for s in rows], end - column, passed)).to(self.device)
        self._state.uniform[first_row : first_row + len(rows), column:end] = drawn

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
