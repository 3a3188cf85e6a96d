"""Packages that SGLang imports and that have no build for CPUs, for the environment of SGLang's tests alone.

A ``.pth`` file of that environment imports this module in every Python process (``make install-sglang``). What is
really installed is never replaced. A stand-in can be imported and looked into; using what it offers is an error, so no
test can pass on an empty kernel.
"""

from __future__ import annotations

import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any

PACKAGES = ("sgl_kernel", "torchvision")


class Missing:
    """Something that a missing package would offer."""

    def __init__(self, name: str) -> None:
        self.__name__ = self.__qualname__ = name

    def __getattr__(self, name: str) -> Missing:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return Missing(f"{self.__name__}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{self.__name__} is not there: its package has no build for this machine")

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return (object,)


class StandIn(types.ModuleType):
    """A module of a missing package."""

    def __getattr__(self, name: str) -> Missing:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return Missing(f"{self.__name__}.{name}")


class Finder:
    """Asked last, after every real finder."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: Any = None) -> Any:
        # "is it installed?" (importlib.util.find_spec) gets a true answer; only an import gets the stand-in
        imported = sys._getframe(2).f_code.co_name == "_find_and_load_unlocked"
        if name.partition(".")[0] not in PACKAGES or not imported:
            return None
        return importlib.machinery.ModuleSpec(name, Finder, is_package=True)  # type: ignore[arg-type]

    @staticmethod
    def create_module(spec: importlib.machinery.ModuleSpec) -> StandIn:
        return StandIn(spec.name)

    @staticmethod
    def exec_module(module: types.ModuleType) -> None:
        """Nothing to run."""


if Finder not in sys.meta_path:
    sys.meta_path.append(Finder)
