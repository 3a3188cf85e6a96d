"""What a run directory says about the run: its configuration, its command, and where and on what it ran.

``config.yaml`` starts the same run again (``--config-path DIR --config-name config``). The records of earlier starts in
the same directory stay, as ``config.1.yaml`` and so on, the oldest with the smallest number.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import logging
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

import verl
from verl import envs
from verl.checkpoint.final_model import provenance_file
from verl.checkpoint.fingerprint import Digests, Fingerprint, compare, used_keys
from verl.checkpoint.manager import CheckpointManager
from verl.config.base import Config, to_dict
from verl.config.trainer import RunConfig
from verl.data import fingerprint_of
from verl.errors import ConfigError
from verl.utils.contents import code_digests, file_digest, model_digests
from verl.utils.fs import atomic_write_text
from verl.utils.json_text import dumps_json, valid_text
from verl.utils.logging import redact, without_secrets

logger = logging.getLogger(__name__)

CONFIG, COMMAND, ENVIRONMENT = "config.yaml", "command.txt", "environment.json"
RECORDS = (CONFIG, COMMAND, ENVIRONMENT)

#: packages whose versions decide numbers or speed; those that are not installed are left out
_PACKAGES = (
    "torch",
    "transformers",
    "tensordict",
    "ray",
    "numpy",
    "tokenizers",
    "safetensors",
    "pyarrow",
    "hydra-core",
    "vllm",
    "sglang",
    "megatron-core",
    "flash-attn",
    "triton",
)
_VARIABLES = re.compile(r"^(?:OMP_|MKL_|CUDA_|NCCL_|GLOO_|TORCH|PYTORCH_|HF_HOME|HF_HUB_OFFLINE|TRANSFORMERS_OFFLINE)")
#: of environment.json: of one start, not of what ran
_OF_THE_START = ("started", "process")


def open_run(
    config: Config, trainer: RunConfig, checkpoints: CheckpointManager, datasets: Mapping[str, Any]
) -> Path | None:
    """Find out whether a run may use its directory, before anything expensive starts.

    The run gets its fingerprint, and is compared with the checkpoint that it resumes from, or with the final model that
    it would replace.

    Args:
        config: the whole configuration.
        trainer: its ``trainer`` section.
        checkpoints: of the run directory.
        datasets: key of the files -> the data set that reads them.

    Returns:
        The checkpoint to resume from; None to start from the beginning.

    Raises:
        ConfigError: the directory belongs to another experiment.
        CheckpointError: no checkpoint can be used.
    """
    checkpoints.fingerprint = fingerprint_of_run(config, datasets)
    resumed = checkpoints.find(trainer.resume_mode, trainer.resume_from_path)
    if resumed is not None:
        checkpoints.require_same_run(resumed, trainer.on_resume_mismatch)
    made = provenance_file(checkpoints.root)
    replaces = trainer.save_final_model and trainer.resume_mode != "disable" and made.exists()
    if replaces and (resumed is None or resumed.parent != checkpoints.root):
        compare(checkpoints.fingerprint, made.parent, made, trainer.on_resume_mismatch)
        logger.info("there is no checkpoint to resume from; the last step will replace the model in %s", made.parent)
    if not trainer.save_final_model and trainer.save_freq < 0:
        logger.warning(
            "nothing of this run will be kept: trainer.save_final_model=False writes no model and trainer.save_freq=-1 "
            "no checkpoint"
        )
    return resumed


def fingerprint_of_run(config: Config, datasets: Mapping[str, Any]) -> Fingerprint:
    """Settings and contents of a run.

    Args:
        config: the whole configuration.
        datasets: key of the files -> the data set that reads them.

    Raises:
        ConfigError: a file cannot be read.
    """
    contents: dict[str, Digests] = {}
    models = cache(model_digests)  # several roles often begin with one model
    for key in used_keys(config):
        value = _value_of(config, key.path)
        if not value or (key.affects not in ("file", "model") and key.path not in datasets):
            continue
        try:
            if key.path in datasets:
                digests: Digests = _rows(datasets[key.path], value)
            else:
                digests = models(value) if key.affects == "model" else code_digests(value)
        except OSError as error:
            raise ConfigError(f"{key.path}={value!r}: cannot be read: {error}") from error
        if digests:
            contents[key.path] = digests
    return Fingerprint.of(config, contents)


def _rows(dataset: Any, files: Sequence[str]) -> Digests:
    """Digest of the rows in use; of the files for a user's class that gives none."""
    digest = fingerprint_of(dataset)
    if digest is not None:
        return {"rows": f"{len(dataset)} rows, {digest[:16]}"}
    return {Path(file).name: file_digest(Path(file).expanduser()) for file in files}


def _value_of(config: Config, path: str) -> Any:
    value: Any = config
    for name in path.split("."):
        value = getattr(value, name)
    return value


def write_record(config: Config, checkpoints: CheckpointManager) -> None:
    """Write the records of this start; those of an earlier start with other contents get numbers.

    A record that cannot be written does not end the run: that is logged.

    Args:
        config: the whole configuration.
        checkpoints: of the run directory, with the run's fingerprint.
    """
    directory, fingerprint = checkpoints.root, checkpoints.fingerprint
    assert fingerprint is not None
    environment = describe_environment(fingerprint)
    texts = {
        CONFIG: OmegaConf.to_yaml(OmegaConf.create(_escaped(redact(to_dict(config))))),
        COMMAND: _command_text(),
        ENVIRONMENT: dumps_json(environment, indent=1) + "\n",
    }
    try:
        if _is_same(directory, texts, environment):
            return
        _number_earlier(directory)
        for name, text in texts.items():
            atomic_write_text(directory / name, valid_text(text))
    except OSError as error:
        logger.warning("the record of this run (%s) was not written: %s", ", ".join(RECORDS), error)


def _is_same(directory: Path, texts: Mapping[str, str], environment: Mapping[str, Any]) -> bool:
    """Whether the records there differ from these in nothing but the time of the start."""
    try:
        if any((directory / name).read_text("utf-8") != texts[name] for name in (CONFIG, COMMAND)):
            return False
        earlier = json.loads((directory / ENVIRONMENT).read_text("utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(earlier, dict) and _lasting(earlier) == _lasting(environment)


def _lasting(environment: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in environment.items() if name not in _OF_THE_START}


def _number_earlier(directory: Path) -> None:
    """Rename the records that are there to the next free number, the same for all of them."""
    present = [directory / name for name in RECORDS if (directory / name).exists()]
    number = 1
    while any((directory / _numbered(name, number)).exists() for name in RECORDS):
        number += 1
    for path in present:
        path.rename(directory / _numbered(path.name, number))


def _numbered(name: str, number: int) -> str:
    stem, _, suffix = name.rpartition(".")
    return f"{stem}.{number}.{suffix}"


def _escaped(value: Any) -> Any:
    """Values as they are read back: text that looks like an interpolation is no interpolation any more."""
    if isinstance(value, Mapping):
        return {name: _escaped(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_escaped(inner) for inner in value]
    return value.replace("${", "\\${") if isinstance(value, str) else value


def command_words() -> list[str]:
    """The words that started this process, with secrets hidden."""
    words = list(getattr(sys, "orig_argv", None) or [sys.executable, *sys.argv])
    return [_without_secret(word) for word in words]


def _without_secret(word: str) -> str:
    """A word of the command line; of ``key=value`` the value is hidden where the key names a secret."""
    key, equals, value = word.partition("=")
    if equals:
        return f"{key}={redact(value, key.rpartition('.')[2])}"
    return without_secrets(word)


def _command_text() -> str:
    return f"# in {os.getcwd()}\n{shlex.join(command_words())}\n"


# ---- environment -----------------------------------------------------------------------------------------------------


def describe_environment(fingerprint: Fingerprint) -> dict[str, Any]:
    """Versions, machine, digests of what the run reads, and the commit of the working directory."""
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "process": os.getpid(),
        "directory": os.getcwd(),
        "python": platform.python_version(),
        "versions": {"verl": verl.__version__, **_versions()},
        "machine": _machine(),
        "variables": _variables(),
        "contents": {key: dict(digests) for key, digests in fingerprint.contents.items()},
        "git": _git(),
    }


def _versions() -> dict[str, str]:
    found: dict[str, str] = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _machine() -> dict[str, Any]:
    memory = None
    with contextlib.suppress(OSError, ValueError):
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "host": platform.node(),
        "system": platform.platform(),
        "processor": _processor(),
        "cpus": os.cpu_count(),
        "memory_bytes": memory,
        "gpus": _gpus(),
    }


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text("utf-8", errors="replace")
    except OSError:
        return platform.processor()
    names = re.findall(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return names[0] if names else platform.machine()


def _gpus() -> list[str]:
    import torch

    if not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def _variables() -> dict[str, str]:
    """Variables of the environment that this library or its numerical packages read; secrets are hidden."""
    names = sorted(name for name in os.environ if name in envs.ENV_VARS or _VARIABLES.match(name))
    hidden: dict[str, str] = redact({name: os.environ[name] for name in names})
    return hidden


def _git() -> dict[str, Any] | None:
    """Commit of the working directory, and whether files differ from it; None outside a repository."""

    def ask(*words: str) -> str | None:
        try:
            done = subprocess.run(["git", *words], capture_output=True, text=True, timeout=5, check=False)
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit = ask("rev-parse", "HEAD")
    if commit is None:
        return None
    status = ask("status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "changed": None if status is None else bool(status)}
