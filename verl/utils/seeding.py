"""Named randomness: every seed of a run is derived from the run's seed and a purpose.

Two places that draw random numbers never share a stream by accident, and a re-run repeats, whatever the order in
which the parts start.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def derive_seed(run_seed: int, *names: str | int) -> int:
    """A 63-bit seed for one purpose.

    The names are hashed with their types and lengths, so ``("a", "bc")`` and ``("ab", "c")``, or ``1`` and ``"1"``,
    differ. The result is the same on every machine and in every version of Python.

    Args:
        run_seed: the seed of the whole run (``trainer.seed``).
        names: the purpose, from coarse to fine, for example ``"rollout", step, sample``.

    Returns:
        An integer in ``[0, 2**63)``.
    """
    digest = hashlib.blake2b(digest_size=8, person=b"verl.seed")
    for name in (int(run_seed), *names):
        if isinstance(name, bool) or not isinstance(name, int | str | np.integer):
            raise TypeError(f"a seed is named by strings and integers, got {name!r} ({type(name).__name__})")
        text = name if isinstance(name, str) else str(int(name))
        raw = text.encode("utf-8")
        kind = b"s" if isinstance(name, str) else b"i"
        digest.update(kind + len(raw).to_bytes(8, "little") + raw)
    return int.from_bytes(digest.digest(), "little") & (2**63 - 1)


def set_seed(seed: int) -> None:
    """Seed the global generators of Python, NumPy and torch (CPU and, where there is one, CUDA)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # NumPy's legacy generator takes 32 bits
    torch.manual_seed(seed)


#: for libraries that read the environment when they start
DETERMINISTIC_ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "FLASH_ATTENTION_DETERMINISTIC": "1",
    "NCCL_ALGO": "Ring",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "PYTHONHASHSEED": "0",
}


def use_deterministic_algorithms() -> None:
    """From now on let torch run, in this process, nothing whose result may vary from call to call.

    Operations that have no such form raise a ``RuntimeError`` that names them. To be called before CUDA is used.
    """
    for name, value in DETERMINISTIC_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # nothing reads it
    torch.backends.cudnn.benchmark = False


@contextmanager
def deterministic(enabled: bool) -> Iterator[None]:
    """:func:`use_deterministic_algorithms` for the time of a block, if ``enabled`` (``trainer.deterministic``)."""
    if not enabled:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    use_deterministic_algorithms()
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def torch_generator(seed: int, device: str | torch.device = "cpu") -> torch.Generator:
    """A torch generator of its own, seeded; for draws that must not depend on anything else."""
    generator = torch.Generator(device=device)
    generator.manual_seed(seed)
    return generator


def get_rng_state() -> dict[str, Any]:
    """State of the global generators of Python, NumPy, torch and every visible CUDA device."""
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Put back what :func:`get_rng_state` returned; the CUDA part is skipped where the device count differs."""
    random.setstate(_as_python_state(state["python"]))
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"].cpu())
    cuda = state.get("cuda")
    if cuda is not None and torch.cuda.is_available() and len(cuda) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([part.cpu() for part in cuda])


def plain_rng_state() -> dict[str, Any]:
    """:func:`get_rng_state` of tensors, numbers, text and lists alone, so that a file of it runs no code when read."""
    state = get_rng_state()
    kind, keys, position, has_gauss, gauss = state["numpy"]
    version, internal, cached = state["python"]
    words = torch.from_numpy(np.asarray(keys, dtype=np.int64))
    state["numpy"] = [kind, words, int(position), int(has_gauss), float(gauss)]
    state["python"] = [version, list(internal), cached]
    return state


def set_plain_rng_state(state: Mapping[str, Any]) -> None:
    """Put back what :func:`plain_rng_state` returned."""
    kind, keys, position, has_gauss, gauss = state["numpy"]
    set_rng_state({**state, "numpy": (kind, keys.numpy().astype(np.uint32), position, has_gauss, gauss)})


def _as_python_state(state: Any) -> tuple[Any, ...]:
    """``random.setstate`` wants tuples; a state that went through JSON comes back as lists."""
    version, internal, gauss = state
    return version, tuple(internal), gauss
