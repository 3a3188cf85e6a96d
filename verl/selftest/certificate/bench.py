"""What the checks of one certificate share: the model in plain Transformers, both engines, rows, and numbers so far."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verl import model_merger
from verl.checkpoint.checksums import write_checksums
from verl.selftest.certificate.engines import (
    LORA_ALPHA,
    LORA_RANK,
    MAX_TOKENS,
    Generator,
    Setup,
    Trainer,
    adapters_of,
    make_trainer,
    model_section,
)
from verl.selftest.certificate.outcome import TEMPERATURE, TRANSFORMERS, Measure, Tolerances
from verl.selftest.certificate.plain import PlainModel
from verl.selftest.certificate.rank_pool import Ranks
from verl.selftest.certificate.rows import Rows, first_difference, make_rows
from verl.selftest.certificate.subject import Subject
from verl.selftest.compare import GRADIENT_FLOOR, Deviation
from verl.utils.owned_dirs import owned_scratch
from verl.utils.tokenizer import textless_tokens
from verl.workers.engine.base import MicroBatching
from verl.workers.rollout.settings import special_tokens


@dataclass
class Bench:
    """One model on the bench.

    Attributes:
        subject: the model.
        setup: the engines.
        tolerances: largest allowed figures.
        longest: no row has more tokens.
        seed: of rows and sampling.
        ranks: processes that share sequences, where several certificates use the same ones.
        generates, trains: there is a rollout engine, a training engine.
    """

    subject: Subject
    setup: Setup
    tolerances: Tolerances
    longest: int
    seed: int = 0
    generates: bool = True
    trains: bool = True
    ranks: Ranks | None = None
    _stack: ExitStack = field(default_factory=ExitStack)

    @cached_property
    def device(self) -> torch.device:
        """Of all models."""
        return torch.device(self.setup.device)

    @cached_property
    def special(self) -> tuple[frozenset[int], int]:
        """Tokens that end a sample, and the padding token, as the rollout engines read them."""
        section = model_section(self.subject, self.setup)
        return special_tokens(section, Path(self.subject.path), self.subject.config, self.subject.tokenizer)

    @cached_property
    def allowed(self) -> Tensor | None:
        """(V,) bool: tokens that have a text; None where all of them have one."""
        tokenizer = self.subject.tokenizer
        if tokenizer is None:
            return None
        known = torch.ones(self.subject.vocabulary, dtype=torch.bool)
        known[list(textless_tokens(tokenizer, len(known)))] = False
        return None if bool(known.all()) else known

    @cached_property
    def rows(self) -> Rows:
        """Rows and prompts."""
        holes = [] if self.allowed is None else (~self.allowed).nonzero()[:, 0].tolist()
        rows = make_rows(
            self.subject, pad=self.special[1], excluded=holes, longest=self.longest, room=MAX_TOKENS, seed=self.seed
        )
        for limit in rows.not_reached:
            self.subject.notes.append(
                f"rows have {max(len(row.token_ids) for row in rows.probe.rows)} tokens and do not go beyond "
                f"{limit.name}={limit.tokens}; --length sets the longest row"
            )
        return rows

    @cached_property
    def plain(self) -> PlainModel:
        """The model of :attr:`trainer` in plain Transformers."""
        plain = self.load_plain(self.subject.path)
        if self.setup.lora:
            plain.add_adapters(adapters_of(self.trainer), LORA_ALPHA / LORA_RANK)
        return plain

    def load_plain(self, directory: str | Path) -> PlainModel:
        """A directory in plain Transformers."""
        return PlainModel(directory, self.device, self.allowed, trust_remote_code=self.subject.trust_remote_code)

    @cached_property
    def reference(self) -> dict[str, Tensor]:
        """Log-probs and entropies of the rows in plain Transformers."""
        return self.plain.forward(self.rows.batch, TEMPERATURE)

    @cached_property
    def reference_gradients(self) -> tuple[float, dict[str, Tensor]]:
        """Loss of the rows and its gradients in plain Transformers, those of what the trainer trains."""
        loss, gradients = self.plain.gradients(self.rows.batch, TEMPERATURE)
        return loss, self.plain.of_adapters(gradients) if self.setup.lora else gradients

    @cached_property
    def embedding_name(self) -> str:
        """Name of the input embedding's weight."""
        embedding = self.plain.model.get_input_embeddings()
        return next(f"{name}.weight" for name, module in self.plain.model.named_modules() if module is embedding)

    @cached_property
    def trainer(self) -> Trainer:
        """The training engine, with the weights of the directory; adapters have made one step, they begin at zero."""
        trainer = make_trainer(self.subject, self.setup)
        if self.setup.lora:
            trainer.update(self.rows.batch, TEMPERATURE)
        return trainer

    @cached_property
    def generator(self) -> Generator:
        """The rollout engine, with the trainer's weights."""
        generator = Generator(self.subject, self.setup, self.rows.longest_prompt)
        generator.sync(self.trainer)
        return generator

    @cached_property
    def updated(self) -> Trainer:
        """The trainer after an update that shows; checks of the first weights come before."""
        _ = self.reference, self.reference_gradients  # of the first weights
        if self.generates:
            _ = self.generator
        self.trainer.update(self.rows.batch, TEMPERATURE)
        return self.trainer

    @cached_property
    def checkpoint(self) -> Path:
        """A checkpoint of :attr:`updated`, with a model for Transformers."""
        step = self.scratch / "global_step_1"  # as a run lays it out
        self.updated.save(step / "actor")
        write_checksums(step)
        return step / "actor"

    @cached_property
    def saved_plain(self) -> PlainModel:
        """What the checkpoint holds for Transformers."""
        return self.load_plain(self.checkpoint / "huggingface")

    @cached_property
    def merged(self) -> Path:
        """The checkpoint as ``verl.model_merger`` makes a model directory of it."""
        return model_merger.merge(self.checkpoint, self.scratch / "merged", backend=self.setup.engine)

    @cached_property
    def scratch(self) -> Path:
        """A directory for files of the checks."""
        return self._stack.enter_context(owned_scratch("certificate"))

    def close(self) -> None:
        """Remove the files."""
        self._stack.close()

    @cached_property
    def micros(self) -> dict[str, MicroBatching]:
        """Ways to cut the rows into micro-batches, by name."""
        longest = max(len(row.token_ids) for row in self.rows.probe.rows)
        return {
            "whole batch": MicroBatching(),
            "2 rows": MicroBatching(size=2),
            "dynamic": MicroBatching(max_tokens=longest + 4),
        }

    @property
    def layouts(self) -> dict[str, bool]:
        """``packed`` and ``padded``, if the engine supports them."""
        return {
            name: packed
            for name, packed in (("packed", True), ("padded", False))
            if (self.trainer.packs if packed else self.trainer.can_pad)
        }

    # ---- comparisons --------------------------------------------------------------------------------------------

    def compare_outputs(
        self,
        check: str,
        case: str,
        got: Mapping[str, Tensor],
        want: Mapping[str, Tensor],
        *,
        against: str = TRANSFORMERS,
        mask: Tensor | None = None,
        tolerance: float | None = None,
    ) -> Iterator[Measure]:
        """One measure for each field of two results (B, R)."""
        chosen = self.rows.batch["response_mask"] if mask is None else mask
        allowed = self.tolerances.log_probs if tolerance is None else tolerance
        for name in want:
            apart = torch.where(chosen != 0, (got[name].double() - want[name].double()).abs(), 0.0)
            figure = float(apart.max()) if not bool(apart.isnan().any()) else float("nan")
            quantity = {"log_probs": "log-probs", "entropys": "entropies"}.get(name, name)
            where = first_difference(got[name], want[name], chosen, allowed)
            yield Measure(check, case, against, Deviation(quantity, figure, allowed), where)

    def compare_gradients(
        self, check: str, case: str, got: Mapping[str, Tensor], want: Mapping[str, Tensor], against: str = TRANSFORMERS
    ) -> Measure:
        """The parameter whose gradient is furthest from the reference; the pad token's embedding is left out.

        It has a check of its own, and may be larger than all others together: it often begins at zero, before a norm.
        """
        allowed = self.tolerances.gradients
        stored = {name for name, _ in self.plain.model.named_buffers()}  # Megatron's bridge writes these too
        got = self._without_pad({name: grad for name, grad in got.items() if name not in stored})
        want = self._without_pad(want)
        if missing := sorted(want.keys() ^ got.keys()):
            return Measure(
                check, case, against, error=f"no gradient to compare for {missing[0]} ({len(missing)} in all)"
            )
        total = float(torch.stack([grad.double().norm() for grad in want.values()]).norm())
        worst, first = (-1.0, ""), ""
        for name, grad in want.items():
            scale = max(float(grad.double().norm()), GRADIENT_FLOOR * total) or 1.0
            figure = float((got[name].double() - grad.double()).norm()) / scale
            if not figure <= worst[0]:
                worst = (figure, name)
            if not first and not figure <= allowed:
                first = name
        name = first or worst[1]
        where = f"{name}: norm {float(got[name].double().norm()):.6g} against {float(want[name].double().norm()):.6g}"
        return Measure(check, case, against, Deviation("gradient", worst[0], allowed), where)

    def _without_pad(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = dict(gradients)
        if self.embedding_name in found:
            found[self.embedding_name] = found[self.embedding_name].clone()
            found[self.embedding_name][self.rows.pad] = 0
        return found

    def exact(self, check: str, case: str, quantity: str, wrong: int, where: str = "", against: str = "") -> Measure:
        """A measure of what must be equal: ``wrong`` counts the exceptions."""
        return Measure(check, case, against, Deviation(quantity, float(wrong), self.tolerances.exact), where)


def describe_setup(setup: Setup) -> dict[str, Any]:
    """What the record says about the engines."""
    return {
        "engine": setup.engine,
        "rollout": setup.rollout,
        "lora": setup.lora,
        "device": setup.device,
        "sequence_ranks": setup.ranks if setup.ranks > 1 else 0,
    }
