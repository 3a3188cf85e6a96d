"""Turn the sharded checkpoint of a role into a Hugging Face directory, or compare it with one.

    python -m verl.model_merger merge --backend fsdp --local_dir runs/a/global_step_20/actor --target_dir merged
    python -m verl.model_merger test  --backend fsdp --local_dir runs/a/global_step_20/actor --test_hf_dir merged

A checkpoint of low-rank adapters is added to its base model. Any number of ranks may have written the checkpoint; one
process with memory for the whole model reads it.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import sys
import uuid
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from verl.checkpoint.checksums import CHECKSUM_FILE, verify_checksums
from verl.checkpoint.manager import MARKER_FILE
from verl.checkpoint.plain_state import PlainReader
from verl.config import ModelConfig
from verl.errors import CheckpointError, ConfigError
from verl.models.loading import (
    DTYPES,
    LOADERS,
    model_class,
    quiet_transformers,
)
from verl.models.lora import is_adapter_name, merged, read_adapter
from verl.utils.exit_status import exit_code, start_program
from verl.utils.fs import directory_bytes, ensure_writable_dir, fsync_tree
from verl.utils.registry import Registry
from verl.workers.engine.checkpoint import ADAPTER_DIR, copy_companions, read_marker

logger = logging.getLogger(__name__)

#: backend -> reads all tensors of a checkpoint, by Hugging Face name
READERS: Registry[Callable[[Path], dict[str, Tensor]]] = Registry("checkpoint backend")


@READERS.register("fsdp")
def read_fsdp(directory: Path) -> dict[str, Tensor]:
    """All tensors of ``model/``, whole.

    Raises:
        CheckpointError: it is damaged.
    """
    try:
        reader = PlainReader(directory / "model")
        entries = reader.read_metadata().state_dict_metadata
        tensors = {name: torch.empty(e.size, dtype=e.properties.dtype) for name, e in entries.items()}  # type: ignore[union-attr]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(dict(tensors), storage_reader=reader, no_dist=True)
    except Exception as error:  # any damage shows up as some other exception
        raise CheckpointError(f"{directory / 'model'} cannot be read: {error}") from error
    return tensors


@READERS.register("megatron")
def read_megatron(directory: Path) -> dict[str, Tensor]:
    """All tensors of the export in ``huggingface/``, which the ranks wrote together: their own shards have other names.

    Without an export the adapters of a language model, which is all that trains there.

    Raises:
        CheckpointError: there is neither.
    """
    marker = read_marker(directory)
    if "hf_model" not in marker["contents"] and marker.get("lora") and marker["head"] == "lm":
        return read_adapter(directory / ADAPTER_DIR)[0]
    if "hf_model" not in marker["contents"]:
        raise CheckpointError(
            f"{directory} has shards under Megatron's own names and no export; save one with checkpoint.save_contents="
            "[model,optimizer,extra,hf_model]: resume the run from here and let it save again"
        )
    tensors: dict[str, Tensor] = {}
    for file in sorted((directory / "huggingface").glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def role_directory(path: str | Path) -> Path:
    """The directory of a role: itself, or ``actor`` of a step directory.

    Raises:
        CheckpointError: there is no checkpoint.
    """
    directory = Path(path).expanduser()
    if not (directory / "engine.json").is_file() and (directory / "actor").is_dir():
        directory = directory / "actor"
    read_marker(directory)
    return directory


def load_tensors(
    directory: Path, backend: str, base_model: str | None = None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a plain model with the checkpoint's weights, adapters added, and the checkpoint's marker.

    Args:
        directory: of a role.
        backend: which engine wrote it.
        base_model: of adapters, if it is no longer where it was.
    """
    if any((directory.parent / name).exists() for name in (MARKER_FILE, CHECKSUM_FILE)):
        verify_checksums(directory.parent, leave_out=[MARKER_FILE])  # a role that was saved outside of a step has none
    marker = read_marker(directory)
    written_by = "megatron" if marker["engine"] == "megatron" else "fsdp"
    if backend != written_by:
        raise ConfigError(f"--backend={backend}: {directory} was written by {marker['engine']}; use {written_by}")
    if "model" not in marker["contents"]:
        raise CheckpointError(f"{directory} holds {marker['contents']} and no model; save one with save_contents")
    tensors = READERS[backend](directory)
    if any(is_adapter_name(name) for name in tensors):
        tensors = _with_base(tensors, directory, marker, base_model)
    return tensors, marker


def _with_base(
    trained: dict[str, Tensor], directory: Path, marker: dict[str, Any], base_model: str | None
) -> dict[str, Tensor]:
    """The base model's tensors, with adapters added and other trained parameters in place."""
    _, config = read_adapter(directory / ADAPTER_DIR)
    path = base_model or config["base_model_name_or_path"]
    model = LOADERS[marker["head"]](ModelConfig(path=path), dtype=torch.float32)
    buffers = dict(model.named_buffers())
    stored = {name: buffers[name] for name in model.state_dict() if name in buffers}  # a router's corrections, say
    tensors = {name: t.detach() for name, t in (*model.named_parameters(), *stored.items())}
    scaling = float(config["lora_alpha"]) / int(config["r"])
    for name, value in trained.items():
        if not is_adapter_name(name):
            tensors[name] = value
        elif name.endswith("lora_A"):
            layer = name.rpartition(".")[0]
            weight = f"{layer}.weight"
            tensors[weight] = merged(tensors[weight], value, trained[f"{layer}.lora_B"], scaling)
    return tensors


def merge(
    local_dir: str | Path,
    target_dir: str | Path,
    *,
    backend: str = "fsdp",
    dtype: str | None = None,
    base_model: str | None = None,
) -> Path:
    """Write a checkpoint as a Hugging Face directory, whole or not at all.

    Args:
        local_dir: of a role, or of a step, whose actor is then taken.
        target_dir: new or empty.
        backend: which engine wrote it.
        dtype: of the weights; None keeps the checkpoint's.
        base_model: of adapters, if it is no longer where it was.

    Returns:
        The directory.

    Raises:
        CheckpointError: the checkpoint is incomplete or damaged, or the target cannot be written.
        ConfigError: an unknown backend, or a target that holds something.
    """
    directory, target = role_directory(local_dir), Path(target_dir).expanduser()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"target_dir={str(target)!r} is not empty; give a new directory")
    ensure_writable_dir(
        target.absolute().parent, purpose="parent of target_dir", min_free_bytes=directory_bytes(directory / "model")
    )
    tensors, marker = load_tensors(directory, backend, base_model)
    if dtype is not None:
        tensors = {name: t.to(DTYPES[dtype]) if t.is_floating_point() else t for name, t in tensors.items()}
    count = len(tensors)  # saving empties the mapping
    staging = target.absolute().parent / f".{target.name}.{uuid.uuid4().hex[:8]}"
    try:
        with quiet_transformers():
            _empty_model(directory, marker["head"], next(iter(tensors.values())).dtype).save_pretrained(
                staging, state_dict=tensors
            )
        copy_companions(directory / "huggingface", staging)
        fsync_tree(staging)
        if target.exists():
            target.rmdir()
        staging.rename(target)
    except OSError as error:
        raise CheckpointError(f"cannot write {target}: {error}") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    logger.info("%s: %d tensors in %s", directory, count, target)
    return target


def _empty_model(directory: Path, head: str, dtype: torch.dtype) -> PreTrainedModel:
    """The model without weights; it knows its config and how its files are laid out."""
    config = AutoConfig.from_pretrained(directory / "huggingface")
    config.dtype = dtype
    kind = model_class(head, config)
    with torch.device("meta"):
        return (kind.from_config if hasattr(kind, "from_config") else kind._from_config)(config, dtype=dtype)


def compare(local_dir: str | Path, hf_dir: str | Path, *, backend: str = "fsdp", base_model: str | None = None) -> int:
    """Check that a Hugging Face directory has exactly the checkpoint's weights; returns how many tensors.

    Raises:
        CheckpointError: naming the tensors that are missing or differ.
    """
    directory = role_directory(local_dir)
    tensors, marker = load_tensors(directory, backend, base_model)
    config = AutoConfig.from_pretrained(hf_dir)
    with quiet_transformers():
        loaded = model_class(marker["head"], config).from_pretrained(hf_dir, dtype="auto")
    found = {name: t.detach() for name, t in (*loaded.named_parameters(), *loaded.named_buffers())}
    wrong = []
    for name, tensor in tensors.items():
        if name not in found:
            wrong.append(f"{name} is missing")
        elif found[name].shape != tensor.shape:
            wrong.append(f"{name} has shape {tuple(found[name].shape)}, expected {tuple(tensor.shape)}")
        elif not torch.equal(found[name], tensor.to(found[name].dtype)):
            difference = (found[name].float() - tensor.float()).abs().max()
            wrong.append(f"{name} differs by up to {difference:g}")
    wrong += [f"{name} is not in the checkpoint" for name, _ in loaded.named_parameters() if name not in tensors]
    if wrong:
        raise CheckpointError(f"{hf_dir} is not {directory}: {len(wrong)} tensors are wrong: {'; '.join(wrong[:5])}")
    return len(tensors)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(
        prog="verl merge" if sys.argv[0] == "verl merge" else "python -m verl.model_merger",
        description="Turn a sharded checkpoint into a Hugging Face directory, or compare it with one.",
        epilog="example: %(prog)s merge --local_dir checkpoints/p/e/global_step_20/actor --target_dir merged\n"
        "The result loads with AutoModelForCausalLM.from_pretrained, vLLM and everything else that reads such "
        "directories.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = top.add_subparsers(dest="operation", required=True)
    for name, text in (
        ("merge", "write the model as a Hugging Face directory"),
        ("test", "check that a Hugging Face directory has exactly the checkpoint's weights"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("--backend", default="fsdp", choices=sorted(READERS), help="engine that wrote it")
        command.add_argument("--local_dir", required=True, help="directory of a role (.../global_step_N/actor)")
        command.add_argument("--base_model", help="base model of adapters, if it is no longer where it was")
        if name == "merge":
            command.add_argument("--target_dir", required=True, help="new directory for the model")
            command.add_argument("--dtype", choices=sorted(DTYPES), help="of the weights (default: as saved)")
        else:
            command.add_argument("--test_hf_dir", required=True, help="the directory to compare with")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Command line: exit code 0 when done, 1 for a failure or a difference, 2 for bad arguments."""
    start_program()
    arguments = parser().parse_args(argv)
    options = {"backend": arguments.backend, "base_model": arguments.base_model}

    def work() -> bool:
        if arguments.operation == "merge":
            target = merge(arguments.local_dir, arguments.target_dir, dtype=arguments.dtype, **options)
            sys.stdout.write(f"the model is in {target}\n")
        else:
            sys.stdout.write(f"{compare(arguments.local_dir, arguments.test_hf_dir, **options)} tensors are equal\n")
        return True

    return exit_code(work)


if __name__ == "__main__":
    sys.exit(main())
