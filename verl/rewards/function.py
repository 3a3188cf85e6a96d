"""The reward function: where it comes from, whether its signature fits, how it reaches another process."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from verl.errors import ConfigError
from verl.rewards.references import problem_of
from verl.utils.dynamic_import import load_object

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
BATCH_ARGUMENTS = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
OPTIONAL = ("prompt_str", "full_solution_str")
"""Given only to a function whose signature names them: the prompt, and the response with tools' words in it."""
BATCH_OPTIONAL = ("prompt_strs", "full_solution_strs")


class ScoreFunction:
    """A reward function with its extra keyword arguments.

    One that was loaded from a file pickles as (path, name, arguments), so that another process loads it from there.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        kwargs: Mapping[str, Any] | None = None,
        origin: tuple[str, str] | None = None,
    ) -> None:
        self.function = function
        self.kwargs = dict(kwargs or {})
        self.origin = origin

    @classmethod
    def from_file(cls, path: str, name: str, kwargs: Mapping[str, Any] | None = None) -> ScoreFunction:
        """Load ``name`` from a Python file or module.

        Raises:
            ConfigError: no such file or function (the message lists what there is), or it is not callable.
        """
        function = load_object(path, name)
        if not callable(function):
            raise ConfigError(f"{name!r} in {path!r} is {type(function).__name__}, not a function")
        return cls(function, kwargs, origin=(path, name))

    def __call__(self, **arguments: Any) -> Any:
        return self.function(**arguments, **self.kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        if self.origin is not None:
            return ScoreFunction.from_file, (*self.origin, self.kwargs)
        return ScoreFunction, (self.function, self.kwargs)

    def __repr__(self) -> str:
        name = getattr(self.function, "__name__", repr(self.function))
        return f"{self.origin[1]} from {self.origin[0]}" if self.origin else name

    @property
    def is_async(self) -> bool:
        """Whether calling it gives a coroutine."""
        call = getattr(type(self.function), "__call__", None)  # noqa: B004  (the method, not the question whether there is one)
        return inspect.iscoroutinefunction(self.function) or inspect.iscoroutinefunction(call)

    def named(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Those of ``names`` that the function's signature spells out and ``kwargs`` does not give."""
        try:
            parameters = inspect.signature(self.function).parameters
        except (TypeError, ValueError):
            return ()
        return tuple(name for name in names if name in parameters and name not in self.kwargs)

    def reference_problem(
        self, data_source: Any, ground_truth: Any, extra_info: Mapping[str, Any] | None = None
    ) -> str | None:
        """What is wrong with a row's reference for this function; None if nothing is, or it declares nothing."""
        return problem_of(self.function, data_source, ground_truth, extra_info, self.kwargs)

    def check_signature(self, arguments: tuple[str, ...] = ARGUMENTS) -> None:
        """Raise :class:`ConfigError` if the function cannot be called with these keywords and its own arguments."""
        try:
            signature = inspect.signature(self.function)
        except (TypeError, ValueError):
            return  # some built-ins tell nothing about themselves
        try:
            signature.bind(**dict.fromkeys(arguments), **self.kwargs)
        except TypeError as error:
            raise ConfigError(
                f"reward function {self!r} has the signature {signature}; it is called with the keywords "
                f"{', '.join([*arguments, *self.kwargs])}: {error}"
            ) from error
