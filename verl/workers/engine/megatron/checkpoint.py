"""Checkpoints of the Megatron engine: Megatron-core's distributed format, readable under other parallel sizes.

A directory has the parts that :mod:`verl.workers.engine.checkpoint` names. Weights and optimizer state are directories
of Megatron-core's ``dist_checkpointing``: tensors of the whole model under Megatron's names. Every rank reads its part
of them, however the model is divided now. With low-rank adapters ``model/`` holds only what trains, and
``lora_adapter/`` the adapters in PEFT's format.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedConfig

from verl.checkpoint.plain_state import check_plain
from verl.config import MegatronConfig, ModelConfig
from verl.errors import CheckpointError
from verl.models.loading import quiet_transformers, resolve_model_dir
from verl.models.lora import save_adapter
from verl.utils.json_text import dumps_json
from verl.utils.seeding import plain_rng_state
from verl.workers.engine.checkpoint import (
    ADAPTER_DIR,
    FORMAT_VERSION,
    MARKER,
    CheckpointedEngine,
    check_contents,
    copy_companions,
    lora_marker,
    on_all_ranks,
    open_checkpoint,
    read_extra,
)
from verl.workers.engine.megatron.bridge import Bridge
from verl.workers.engine.megatron.optimizer import inner_optimizers, materialise
from verl.workers.engine.megatron.parallel import construction

#: the form of the distributed optimizer's state in which it can be read under other sizes
_METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}


class SavedEngine(CheckpointedEngine, Protocol):
    """What a checkpoint reads from a Megatron engine."""

    device: torch.device
    model_config: ModelConfig
    megatron_config: MegatronConfig
    hf_config: PreTrainedConfig
    models: list[nn.Module]
    bridge: Bridge

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]: ...


def save(engine: SavedEngine, path: Path, contents: frozenset[str]) -> None:
    """Write the parts named in ``contents`` into directory ``path``. Collective.

    Raises:
        CheckpointError: an unknown part, the optimizer of an engine that has none, or a failed write (on every rank).
    """
    check_contents(contents)
    if "optimizer" in contents and engine.optimizer is None:
        raise CheckpointError("this engine only evaluates and has no optimizer to save; drop it from save_contents")
    rank, world = engine.layout.rank, engine.layout.world_size

    def write_local() -> None:
        path.mkdir(parents=True, exist_ok=True)
        if rank == 0:
            (path / MARKER).unlink(missing_ok=True)
            for part in ("model", "optimizer"):  # of an earlier save
                shutil.rmtree(path / part, ignore_errors=True)
                if part in contents:
                    (path / part).mkdir()
        if "extra" in contents:
            (path / "extra").mkdir(exist_ok=True)
            torch.save(plain_rng_state(), path / "extra" / f"rng_rank_{rank}.pt")
            if rank == 0:
                counters = {"step": engine.step, "lr_step": engine.lr_step}
                (path / "extra" / "counters.json").write_text(dumps_json(counters))
        if rank == 0:
            target = path / "huggingface"
            target.mkdir(exist_ok=True)
            engine.hf_config.save_pretrained(target)
            copy_companions(resolve_model_dir(engine.model_config.path), target)
            tokenizer = engine.model_config.tokenizer_path
            if tokenizer and Path(tokenizer).is_dir():
                copy_companions(Path(tokenizer), target)

    on_all_ranks(world, f"write {path}", write_local)
    if "model" in contents:
        _megatron(engine, "write", path / "model", lambda save, _: save(_weights(engine), str(path / "model")))
    if "optimizer" in contents:
        _megatron(
            engine, "write", path / "optimizer", lambda save, _: save(_optimizer(engine), str(path / "optimizer"))
        )
    if "hf_model" in contents:
        export_hf(engine, path / "huggingface")
    adapter: dict[str, Tensor] = {}
    if "model" in contents and engine.lora is not None:
        for name, tensor in engine.bridge.export_adapters():
            if rank == 0:
                adapter[name] = tensor.to("cpu", copy=True)

    def finish() -> None:
        if rank == 0:
            if engine.lora is not None and adapter:
                save_adapter(adapter, engine.lora, str(engine.model_config.path), path / ADAPTER_DIR)
            marker = {
                "format": FORMAT_VERSION,
                "engine": "megatron",
                "head": engine.head,
                "world_size": world,
                "contents": sorted(contents),
                "parameters": len(engine.bridge.shapes),
                "lora": lora_marker(engine),
                "distributed_optimizer": engine.megatron_config.use_distributed_optimizer,
            }
            (path / MARKER).write_text(dumps_json(marker, indent=1))

    on_all_ranks(world, f"finish {path}", finish)


def load(engine: SavedEngine, path: Path, contents: frozenset[str]) -> None:
    """Read the parts named in ``contents`` from directory ``path``. Collective.

    Random states are restored where the number of ranks is the saved one; otherwise they are left alone.

    Raises:
        CheckpointError: the directory is missing or incomplete, lacks a part, or holds another model (on every rank).
    """
    marker, contents = _open(engine, path, contents)
    if "model" in contents:
        _read_weights(engine, path)
    if "optimizer" in contents:

        def read(_: Any, load: Any) -> None:
            state = load(_optimizer(engine, loading=True), str(path / "optimizer"))
            engine.optimizer.load_state_dict(state["optimizer"])
            for inner in inner_optimizers(engine.optimizer):
                for values in inner.state.values():
                    if isinstance(values.get("step"), Tensor):  # Megatron-core gives one counter to all parameters
                        values["step"] = values["step"].clone()

        _megatron(engine, "read", path / "optimizer", read)
    if engine.optimizer is not None and "model" in contents and "optimizer" not in contents:
        engine.optimizer.reload_model_params()
    if "extra" in contents:
        read_extra(engine, path, marker)


def load_weights(engine: SavedEngine, path: Path) -> None:
    """Read the weights alone from a checkpoint directory. Collective."""
    _open(engine, path, frozenset({"model"}))
    _read_weights(engine, path)


def _read_weights(engine: SavedEngine, path: Path) -> None:
    def read(_: Any, load: Any) -> None:
        state = load(_weights(engine), str(path / "model"))
        for number, model in enumerate(engine.models):
            model.load_state_dict(state.get(f"model{number}", {}), strict=engine.lora is None)

    _megatron(engine, "read", path / "model", read)


def export_hf(engine: SavedEngine, target: Path) -> None:
    """Write the model as ``from_pretrained`` reads it. Collective; rank 0 holds the whole model on the host."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoModelForTokenClassification

    rank, world = engine.layout.rank, engine.layout.world_size
    whole: dict[str, Tensor] = {}
    for name, tensor in engine.named_tensors():
        if rank == 0:
            whole[name] = tensor.to("cpu", copy=True)
    kinds: dict[str, Any] = {
        "lm": AutoModelForCausalLM,
        "value": AutoModelForTokenClassification,
        "classifier": AutoModelForSequenceClassification,
    }

    def write() -> None:
        if rank == 0:
            with quiet_transformers(), torch.device("meta"):
                if engine.head != "lm":
                    engine.hf_config.num_labels = whole["score.weight"].shape[0]
                shell = kinds[engine.head].from_config(engine.hf_config)
            with quiet_transformers():
                shell.save_pretrained(target, state_dict=whole)

    on_all_ranks(world, f"write {target}", write)


def _open(engine: SavedEngine, path: Path, contents: frozenset[str]) -> tuple[dict[str, Any], frozenset[str]]:
    """The marker and the parts to read, see :func:`open_checkpoint`. Collective."""

    def check(marker: dict[str, Any], parts: frozenset[str]) -> None:
        distributed = engine.megatron_config.use_distributed_optimizer
        if "optimizer" in parts and marker["distributed_optimizer"] != distributed:
            raise CheckpointError(
                f"{path} has the optimizer state of megatron.use_distributed_optimizer={not distributed}, this run has "
                f"{distributed}; set the key as it was, or load without the optimizer (checkpoint.load_contents)"
            )
        for part in parts & {"model", "optimizer"}:
            check_plain(path / part)

    return open_checkpoint(engine, path, contents, written_by="megatron", check=check)


def _weights(engine: SavedEngine) -> dict[str, Any]:
    """What ``model/`` holds, piece by piece: all weights, or with adapters those that train."""
    # layers may differ in their adapters; then each has names of its own
    metadata = _METADATA if engine.lora is None else _METADATA | {"non_homogeneous_layers": True}
    weights = {}
    for number, model in enumerate(engine.models):
        parts = model.sharded_state_dict(metadata=dict(metadata))
        if engine.lora is not None:
            parts = {n: p for n, p in parts.items() if isinstance(p.data, nn.Parameter) and p.data.requires_grad}
        weights[f"model{number}"] = parts
    return weights


def _optimizer(engine: SavedEngine, *, loading: bool = False) -> dict[str, Any]:
    materialise(engine.optimizer)
    weights = _weights(engine)
    if len(engine.models) == 1:
        weights = {"model": weights["model0"]}
    state = engine.optimizer.sharded_state_dict(weights, is_loading=loading, metadata=dict(_METADATA))
    return {"optimizer": state}


def _megatron(engine: SavedEngine, verb: str, directory: Path, action: Callable[[Any, Any], None]) -> None:
    """Call Megatron-core's ``save`` or ``load``; if that fails anywhere every rank raises."""
    from megatron.core.dist_checkpointing import load as megatron_load
    from megatron.core.dist_checkpointing import save as megatron_save

    def run() -> None:
        with construction(engine.device):
            action(megatron_save, megatron_load)

    dist.barrier()
    on_all_ranks(engine.layout.world_size, f"{verb} {directory}", run)
