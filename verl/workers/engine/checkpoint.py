"""Checkpoints of a training engine: the parts of a directory that every engine writes and reads alike.

A directory holds

- ``model/`` and ``optimizer/``: sharded tensors, in the format of the engine (its ``checkpoint`` module);
- ``extra/``: schedule and step counters, and each rank's random state;
- ``huggingface/``: config and tokenizer files, and with ``hf_model`` the weights, as ``from_pretrained`` reads them;
- ``engine.json``: written last; its presence says that the rest is complete.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from verl.errors import CheckpointError
from verl.models.lora import LoraSettings
from verl.utils.plain_pickle import describe_damage
from verl.utils.seeding import set_plain_rng_state
from verl.workers.engine.base import ParallelLayout

logger = logging.getLogger(__name__)


class CheckpointedEngine(Protocol):
    """What the shared parts of a checkpoint read from an engine, and restore in it."""

    optimizer: Any
    head: str
    layout: ParallelLayout
    lora: LoraSettings | None
    step: int
    lr_step: int


FORMAT_VERSION = 1


PARTS = ("model", "optimizer", "extra", "hf_model")


MARKER = "engine.json"


ADAPTER_DIR = "lora_adapter"


# Files of a model directory that belong to the tokenizer or to generation rather than to the weights.
_COMPANION_PATTERNS = (
    "added_tokens.json",
    "chat_template*",
    "generation_config.json",
    "merges.txt",
    "*preprocessor_config.json",
    "processor_config.json",
    "sentencepiece*.model",
    "special_tokens_map.json",
    "tokenizer*",
    "vocab*",
    "*.tiktoken",
    "*.py",
)


def lora_marker(engine: CheckpointedEngine) -> dict[str, Any] | None:
    """What the marker says of an engine's adapters; None without."""
    lora = engine.lora
    return None if lora is None else {"rank": lora.rank, "alpha": lora.alpha}


def open_checkpoint(
    engine: CheckpointedEngine,
    path: Path,
    contents: frozenset[str],
    *,
    written_by: str,
    check: Callable[[dict[str, Any], frozenset[str]], None],
) -> tuple[dict[str, Any], frozenset[str]]:
    """Find out whether a directory can be read into an engine. Collective.

    Args:
        engine: that reads.
        path: the directory.
        contents: parts that are wanted.
        written_by: the kind of engine whose files can be read.
        check: what else must hold, called with the marker and the parts to read.

    Returns:
        The marker, and the parts to read: those wanted that the engine has.

    Raises:
        CheckpointError: it cannot, on every rank.
    """
    check_contents(contents)
    parts = contents - {"hf_model"}  # an export, made from "model"
    if engine.optimizer is None:
        parts -= {"optimizer"}
    marker: dict[str, Any] = {}

    def run() -> None:
        marker.update(read_marker(path))
        if marker["engine"] != written_by:
            strategy = "megatron" if marker["engine"] == "megatron" else "fsdp"
            raise CheckpointError(
                f"{path} was written by the {marker['engine']} engine; resume with strategy={strategy}, or start from "
                "its huggingface directory (save it with checkpoint.save_contents=[hf_model,...]) as model.path"
            )
        if marker["head"] != engine.head:
            raise CheckpointError(f"{path} has a {marker['head']!r} head, this engine a {engine.head!r} head")
        lacking = sorted(parts - set(marker["contents"]))
        if lacking:
            raise CheckpointError(
                f"{path} holds {marker['contents']} and not {lacking}; drop them from checkpoint.load_contents or "
                "choose another checkpoint"
            )
        if "model" in parts and marker.get("lora") != lora_marker(engine):
            raise CheckpointError(
                f"{path} was saved with adapters {marker.get('lora')}, this run has {lora_marker(engine)}; set "
                "model.lora_rank, lora_alpha and target_modules as they were"
            )
        check(marker, parts)

    on_all_ranks(engine.layout.world_size, f"read {path}", run)
    return marker, parts


def read_extra(engine: CheckpointedEngine, path: Path, marker: dict[str, Any]) -> None:
    """Restore counters, and random states where the number of ranks is the saved one. Collective."""
    rank, world = engine.layout.rank, engine.layout.world_size

    def run() -> None:
        counters = json.loads((path / "extra" / "counters.json").read_text())
        engine.step, engine.lr_step = int(counters["step"]), int(counters["lr_step"])
        if marker["world_size"] == world:
            file = path / "extra" / f"rng_rank_{rank}.pt"
            try:
                set_plain_rng_state(torch.load(file, weights_only=True))
            except Exception as error:  # torch and pickle raise whatever the bytes lead them to
                raise CheckpointError(f"{file} cannot be read: {describe_damage(error)}") from error
        else:
            logger.info("%s: random states of %d ranks do not fit %d", path, marker["world_size"], world)

    on_all_ranks(world, f"read {path / 'extra'}", run)


def read_marker(path: Path) -> dict[str, Any]:
    """Content of ``engine.json``.

    Raises:
        CheckpointError: no such directory, or a checkpoint that was not finished.
    """
    if not path.is_dir():
        raise CheckpointError(
            f"there is no checkpoint directory {path}; check the path. If the run that saved had no {path.name}, this "
            "one starts anew with trainer.resume_mode=disable"
        )
    try:
        marker = json.loads((path / MARKER).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} has no readable {MARKER} ({error}): the checkpoint was not finished or is not one of this engine; "
            "choose another"
        ) from error
    if not isinstance(marker, dict):
        raise CheckpointError(f"{path / MARKER} holds a {type(marker).__name__} instead of an object; choose another")
    if marker.get("format") != FORMAT_VERSION:
        raise CheckpointError(f"{path} has format {marker.get('format')!r}; this version reads {FORMAT_VERSION}")
    kinds: dict[str, type] = {"engine": str, "head": str, "contents": list, "world_size": int}
    if wrong := [name for name, kind in kinds.items() if not isinstance(marker.get(name), kind)]:
        raise CheckpointError(f"{path / MARKER} is damaged: it has no proper {', '.join(wrong)}; choose another")
    return marker


def copy_companions(source: Path, target: Path) -> None:
    """Copy tokenizer, chat template and generation settings from one model directory to another."""
    for pattern in _COMPANION_PATTERNS:
        for file in sorted(source.glob(pattern)):
            if file.is_file() and file.resolve() != (target / file.name).resolve():
                shutil.copyfile(file, target / file.name)


def check_contents(contents: frozenset[str]) -> None:
    unknown = sorted(contents - set(PARTS))
    if unknown:
        raise CheckpointError(f"unknown checkpoint contents {unknown}; choose from {', '.join(PARTS)}")


def on_all_ranks(world: int, what: str, action: Callable[[], None], group: dist.ProcessGroup | None = None) -> None:
    """Run something that may fail; if it fails anywhere every rank raises, so that none waits for another."""
    problem: str | None = None
    cause: Exception | None = None
    try:
        action()
    except Exception as error:  # noqa: BLE001 - told to all ranks and raised again below
        cause = error
        reason = describe_damage(error) if type(error).__module__ != "builtins" else f"{type(error).__name__}: {error}"
        problem = str(error) if isinstance(error, CheckpointError) else f"cannot {what}: {reason}"
    if world > 1:
        problems: list[str | None] = [None] * world
        dist.all_gather_object(problems, problem, group)
        problem = problem or next((p for p in problems if p), None)
    if problem:
        raise CheckpointError(problem) from cause
