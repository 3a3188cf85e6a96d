"""Checkpoints of the FSDP2 engine: a copy in host memory, written by a background thread, and what is loaded.

``model/`` and ``optimizer/`` are ``torch.distributed.checkpoint`` directories. Tensors are stored under Hugging Face
parameter names, with ``.<state>`` appended for the optimizer, so that any number of ranks can read them. With low-rank
adapters ``lora_adapter/`` holds these in PEFT's format, and ``model/`` only what trains.
"""

from __future__ import annotations

import logging
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from transformers import PreTrainedModel

from verl.checkpoint.checksums import forget_recorded, record_checksums
from verl.checkpoint.plain_state import PlainReader
from verl.checkpoint.staged_shards import StagedShard
from verl.config import CheckpointConfig, ModelConfig
from verl.errors import CheckpointError
from verl.models.heads import HeadModel
from verl.models.loading import quiet_transformers, resolve_model_dir
from verl.models.lora import LoraSettings, is_adapter_name, save_adapter
from verl.utils.background import BackgroundTask
from verl.utils.fs import format_bytes, free_bytes
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
from verl.workers.engine.fsdp.sharding import whole_tensor

logger = logging.getLogger(__name__)


_NICENESS = 5  # of the thread that writes a copy


class SavedEngine(CheckpointedEngine, Protocol):
    """What a checkpoint reads from an FSDP2 engine."""

    device: torch.device
    model_config: ModelConfig
    checkpoint_config: CheckpointConfig | None
    module: HeadModel

    def hf_tensors(self) -> dict[str, Tensor]: ...

    def saved_tensors(self) -> dict[str, Tensor]: ...

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]: ...


@dataclass
class Snapshot:
    """One rank's share of a checkpoint, as it was at one moment.

    Attributes:
        rank, world: of the engine.
        contents: parts to write.
        shards: ``model`` and ``optimizer``, as far as they are written: live tensors by name, or where a copy of them
            belongs that is laid out as a file.
        to_copy: live tensors of the parts of which there is to be a copy, until :meth:`copy` has made it.
        whole: with ``hf_model``, on rank 0, the whole model on the host.
        adapter: with ``model``, on rank 0, the whole tensors of low-rank adapters.
        lora, base_model: what the adapters are, and of which model.
        counters: schedule and step counters.
        rng: this process's random state.
        marker: content of ``engine.json``.
        companions: directories whose tokenizer files belong to the model.
        export: the module that knows the model's config and how to write it.
    """

    rank: int
    world: int
    contents: frozenset[str]
    shards: dict[str, dict[str, Tensor] | StagedShard]
    to_copy: dict[str, dict[str, Tensor]]
    whole: dict[str, Tensor]
    adapter: dict[str, Tensor]
    lora: LoraSettings | None
    base_model: str
    counters: dict[str, int]
    rng: dict[str, Any]
    marker: dict[str, Any]
    companions: list[Path]
    export: PreTrainedModel

    def copy(self) -> None:
        """Fill the images; until then nothing that is saved may change."""
        while self.to_copy:
            part, tensors = self.to_copy.popitem()
            image = self.shards[part]
            assert isinstance(image, StagedShard)
            image.fill(tensors)


def take(engine: SavedEngine, contents: frozenset[str], *, images: dict[str, StagedShard] | None = None) -> Snapshot:
    """Collect what :func:`write` writes. Collective.

    Args:
        engine: the engine.
        contents: parts.
        images: copy everything to the host, so that the engine may go on: :meth:`Snapshot.copy` puts the shards into
            these, by part, which are made where they are missing and may be used for the next snapshot when this one
            is written. Without, the snapshot has the live tensors.

    Raises:
        CheckpointError: an unknown part, or the optimizer of an engine that has none.
    """
    check_contents(contents)
    if "optimizer" in contents and engine.optimizer is None:
        raise CheckpointError("this engine only evaluates and has no optimizer to save; drop it from save_contents")
    model = engine.saved_tensors()
    tokenizer = engine.model_config.tokenizer_path
    companions = [resolve_model_dir(engine.model_config.path)]
    if tokenizer and Path(tokenizer).is_dir():
        companions.append(Path(tokenizer))
    live: dict[str, dict[str, Tensor]] = {}
    if "model" in contents:
        live["model"] = {name: tensor.detach() for name, tensor in model.items()}
    if "optimizer" in contents:
        live["optimizer"] = optimizer_tensors(engine)
    shards: dict[str, Any] = dict(live)
    copy = images is not None
    if images is not None:
        shards = {part: _image(part, tensors, engine, images) for part, tensors in live.items()}
    return Snapshot(
        rank=engine.layout.rank,
        world=engine.layout.world_size,
        contents=contents,
        shards=shards,
        to_copy=live if copy else {},
        whole=_whole(engine, copy=copy) if "hf_model" in contents else {},
        counters={"step": engine.step, "lr_step": engine.lr_step},
        rng=plain_rng_state(),
        marker={
            "format": FORMAT_VERSION,
            "engine": "fsdp2",
            "head": engine.head,
            "world_size": engine.layout.world_size,
            "contents": sorted(contents),
            "parameters": len(model),
            "lora": lora_marker(engine),
        },
        adapter=_adapter(engine, copy=copy) if "model" in contents else {},
        lora=engine.lora,
        base_model=str(engine.model_config.path),
        companions=companions,
        export=engine.module.model,
    )


def write(snapshot: Snapshot, path: Path, group: dist.ProcessGroup | None = None) -> None:
    """Write a snapshot into directory ``path``. Collective over ``group``.

    Args:
        snapshot: of this rank.
        path: the directory; all ranks see it.
        group: ranks to agree with; None is the default group. A thread beside the training needs one of its own.

    Raises:
        CheckpointError: a failed write, on every rank.
    """
    rank, world, contents = snapshot.rank, snapshot.world, snapshot.contents

    def write_local() -> None:
        path.mkdir(parents=True, exist_ok=True)
        if rank == 0:
            (path / MARKER).unlink(missing_ok=True)
            forget_recorded(path)
            for part in ("model", "optimizer"):  # of an earlier save
                shutil.rmtree(path / part, ignore_errors=True)
        if "extra" in contents:
            (path / "extra").mkdir(exist_ok=True)
            torch.save(snapshot.rng, path / "extra" / f"rng_rank_{rank}.pt")
            if rank == 0:
                (path / "extra" / "counters.json").write_text(dumps_json(snapshot.counters))
        if rank == 0:
            target = path / "huggingface"
            target.mkdir(exist_ok=True)
            snapshot.export.config.save_pretrained(target)
            for source in snapshot.companions:
                copy_companions(source, target)

    on_all_ranks(world, f"write {path}", write_local, group)
    for part, shards in snapshot.shards.items():
        if isinstance(shards, StagedShard):
            on_all_ranks(world, f"write {path / part}", partial(_write_image, shards, path, part, rank), group)
        else:
            _dcp(shards, path / part, world, "write", group)

    def finish() -> None:
        if rank == 0:
            if "hf_model" in contents:
                with quiet_transformers():
                    snapshot.export.save_pretrained(path / "huggingface", state_dict=snapshot.whole)
            if snapshot.lora is not None and snapshot.adapter:
                save_adapter(snapshot.adapter, snapshot.lora, snapshot.base_model, path / ADAPTER_DIR)
            (path / MARKER).write_text(dumps_json(snapshot.marker, indent=1))

    on_all_ranks(world, f"finish {path}", finish, group)


def _image(part: str, tensors: dict[str, Tensor], engine: SavedEngine, images: dict[str, StagedShard]) -> StagedShard:
    """The part's image, made if there is none that fits these tensors. Collective."""
    image = images.get(part)
    if image is None or not image.fits(tensors):
        images.pop(part, None)  # its memory first
        with _dcp_errors(f"lay out the {part} for saving", str):
            image = StagedShard(tensors, world=engine.layout.world_size, pin=engine.device.type == "cuda")
        images[part] = image
        logger.info("background saves keep %s of host memory for copies of the %s", format_bytes(image.nbytes), part)
    return image


def _write_image(image: StagedShard, path: Path, part: str, rank: int) -> None:
    (path / part).mkdir(exist_ok=True)
    digests: dict[str, str] = {}
    # A thread of its own, because who has stepped back may not step forward again, and a thread that has must not hold
    # the interpreter lock for long: on a machine without free cores the training would wait for it.
    task = BackgroundTask(lambda: digests.update(image.write(path / part)), name="verl-write", niceness=_NICENESS)
    task.wait()
    record_checksums(path, f"{part}-{rank}", {f"{part}/{name}": digest for name, digest in digests.items()})


def _adapter(engine: SavedEngine, *, copy: bool) -> dict[str, Tensor]:
    """The whole adapter tensors on the host of rank 0. Collective."""
    tensors: dict[str, Tensor] = {}
    if engine.lora is None:
        return tensors
    for name, tensor in engine.hf_tensors().items():
        if is_adapter_name(name):
            whole = whole_tensor(tensor.detach())
            if engine.layout.rank == 0:
                tensors[name] = whole.to("cpu", copy=copy)
    return tensors


def _whole(engine: SavedEngine, *, copy: bool) -> dict[str, Tensor]:
    """The whole model on the host of rank 0. Collective."""
    whole: dict[str, Tensor] = {}
    for name, tensor in engine.named_tensors():
        if engine.layout.rank == 0:
            # on CPU the live parameter itself, unless it is to be copied
            whole[name] = tensor.to("cpu", copy=copy)
    return whole


def load(engine: SavedEngine, path: Path, contents: frozenset[str]) -> None:
    """Read the parts named in ``contents`` from directory ``path``. Collective.

    Random states are restored where the number of ranks is the saved one; otherwise they are left alone.

    Raises:
        CheckpointError: the directory is missing or incomplete, lacks a part, or holds another model (on every rank).
    """
    world = engine.layout.world_size

    def check(marker: dict[str, Any], parts: frozenset[str]) -> None:
        if "model" in parts:
            strict = engine.checkpoint_config is None or engine.checkpoint_config.strict
            _check_names(path / "model", set(engine.saved_tensors()), strict)

    marker, contents = open_checkpoint(engine, path, contents, written_by="fsdp2", check=check)
    if "model" in contents:
        stored = _stored_names(path / "model")
        wanted = {name: tensor.detach() for name, tensor in engine.saved_tensors().items() if name in stored}
        _dcp(wanted, path / "model", world, "read")
    if "optimizer" in contents:
        _dcp(optimizer_tensors(engine), path / "optimizer", world, "read")
    if "extra" in contents:
        read_extra(engine, path, marker)


def optimizer_tensors(engine: SavedEngine) -> dict[str, Tensor]:
    """The live optimizer state as ``<parameter>.<state>``; made first if no step has been taken yet."""
    optimizer = engine.optimizer
    assert optimizer is not None
    if not optimizer.state:
        _materialise(optimizer)
    names = {id(p): name for name, p in engine.hf_tensors().items()}
    tensors: dict[str, Tensor] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for key, value in optimizer.state[parameter].items():
                if isinstance(value, Tensor):
                    tensors[f"{names[id(parameter)]}.{key}"] = value
    return tensors


def _materialise(optimizer: torch.optim.Optimizer) -> None:
    """Create the state tensors by a step of zero length, then set them back to how a fresh optimizer has them."""
    saved = [(group, group["lr"]) for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, lr in saved:
        group["lr"] = lr
    for values in optimizer.state.values():
        for value in values.values():
            if isinstance(value, Tensor):
                value.zero_()


def _stored_names(directory: Path) -> set[str]:
    try:
        return set(PlainReader(directory).read_metadata().state_dict_metadata)
    except Exception as error:  # any damage of the file shows up as some other exception
        raise CheckpointError(f"{directory} is damaged ({error}); choose another checkpoint") from error


def _check_names(directory: Path, wanted: set[str], strict: bool) -> None:
    stored = _stored_names(directory)
    missing, extra = sorted(wanted - stored), sorted(stored - wanted)
    if not missing and not extra:
        return
    text = f"{directory} lacks {len(missing)} parameters {missing[:3]} and has {len(extra)} unknown ones {extra[:3]}"
    if strict:
        raise CheckpointError(f"{text}; use the model it was saved from, or checkpoint.strict=false to load what fits")
    logger.warning("%s; loading what fits", text)


def _dcp(
    tensors: dict[str, Any],
    directory: Path,
    world: int,
    verb: Literal["read", "write"],
    group: dist.ProcessGroup | None = None,
) -> None:
    """Read into tensors, or write them. Collective over ``group``."""
    ranks: dict[str, Any] = {"no_dist": world == 1, "process_group": group}
    with _dcp_errors(f"{verb} {directory}", partial(_space, directory, verb)):
        if verb == "write":
            dcp.save(tensors, checkpoint_id=str(directory), **ranks)
        else:
            dcp.load(tensors, storage_reader=PlainReader(directory), **ranks)


@contextmanager
def _dcp_errors(what: str, hint: Callable[[], str]) -> Iterator[None]:
    """Turn what ``torch.distributed.checkpoint`` raises into a :class:`CheckpointError`."""
    try:
        with warnings.catch_warnings():
            # Without other ranks no process group is needed, and that is no news.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as error:  # a BaseException: what failed, by rank
        causes = "; ".join(f"rank {rank}: {cause[0]!r}" for rank, cause in sorted(error.failures.items()))
        raise CheckpointError(f"cannot {what}: {causes}{hint()}") from error
    except Exception as error:  # planning errors, pickle's and the file system's
        raise CheckpointError(f"cannot {what}: {error}{hint()}") from error


def _space(directory: Path, verb: str) -> str:
    """What torch does not say of a failed write: its file format reports a full disk as a wrong position."""
    free = free_bytes(directory)
    if verb != "write" or free > 1 << 20:
        return ""
    return (
        f" (No space left on device: {format_bytes(free)} free; keep fewer checkpoints with trainer.max_ckpt_to_keep)"
    )
