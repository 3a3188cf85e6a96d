"""A worker group of one worker that lives in the controller's process: breakpoints and profilers just work.

Calls go through the same dispatch and collect functions as under Ray, with one rank. Differences: a call has ended
when it returns, non-blocking or not, and arguments are not copied, so a worker that writes into a tensor in place
writes into the controller's.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

from verl.errors import ConfigError, WorkerError
from verl.protocol import Completed, DataProto
from verl.single_controller.base.classes import ClassWithInitArgs
from verl.single_controller.base.failure import worker_error
from verl.single_controller.base.worker_group import WorkerGroup

#: a process group of one needs no meeting point: MASTER_ADDR and MASTER_PORT stay as they are
_ENVIRONMENT = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}


class LocalWorkerGroup(WorkerGroup):
    """One worker, or several roles of one, in this process.

    Args:
        cls_with_init: class with arguments, or several from ``create_colocated_worker_cls``.
        role: name in errors; by default made from the class's name.
        worker_env: environment variables while the worker's code runs. Those that libraries read when they are
            imported come too late here; set them before starting the program.

    Raises:
        ConfigError: the program itself is one of several processes (``WORLD_SIZE`` > 1).
        WorkerError: a constructor raised.
    """

    def __init__(
        self,
        cls_with_init: ClassWithInitArgs | None = None,
        *,
        role: str | None = None,
        worker_env: Mapping[str, str] | None = None,
        _process: _Process | None = None,
    ) -> None:
        if _process is None:
            if cls_with_init is None:
                raise ConfigError("a local worker group needs a class with its arguments")
            _process = _Process(cls_with_init.roles(role), worker_env or {})
        self._process = _process
        self._role_names = tuple(_process.classes)
        name = role if role in _process.classes else "_".join(_process.classes)
        super().__init__(name, _process.classes.get(name), 1)

    @property
    def workers(self) -> list[Any]:
        """The worker object of this role, as the only rank; of all roles where the group holds several."""
        return [self._process.roles[self.role]] if self.role in self._process.roles else [*self._process.roles.values()]

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles that live in the process."""
        return tuple(self._process.classes)

    @property
    def process_ids(self) -> list[int]:
        """This process."""
        return [os.getpid()]

    def spawn(self, prefix_set: Iterable[str]) -> dict[str, LocalWorkerGroup]:
        """A worker group for each named role, on the same objects."""
        return {name: LocalWorkerGroup(role=name, _process=self._process) for name in self._check_roles(prefix_set)}

    def shutdown(self) -> None:
        """Drop the workers; groups that share them end too."""
        self._process.roles.clear()

    def _submit(
        self,
        ranks: Sequence[int],
        method: str,
        args: Sequence[Sequence[Any]],
        kwargs: Sequence[Mapping[str, Any]],
        used: Container[int] | None = None,
    ) -> list[Any]:
        if self.role not in self._process.classes:
            raise ConfigError(f"this group holds the roles {list(self.roles)}; call one of them through spawn()")
        return [
            Completed(self._process.call(self.role, method, rank_args, rank_kwargs))
            for rank_args, rank_kwargs in zip(args, kwargs, strict=True)
        ]

    def _fetch(
        self,
        references: Sequence[Any],
        method: str,
        timeout_s: float | None,
        watch: Sequence[Any] | None = None,
        ranks: Sequence[int] | None = None,
    ) -> list[Any]:
        return [reference.value for reference in references]

    def _remember(self, result: DataProto, shards: Sequence[DataProto], references: Sequence[Any]) -> None:
        """Nothing: arguments are not sent anywhere."""


class _Process:
    """The roles' objects and how user code is run."""

    def __init__(self, roles: Mapping[str, ClassWithInitArgs], environment: Mapping[str, str]) -> None:
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ConfigError(
                f"the local controller is a single process, but WORLD_SIZE={os.environ['WORLD_SIZE']}; "
                "start the program without torchrun, or use trainer.controller=ray"
            )
        self.environment = {**_ENVIRONMENT, **environment}
        self.classes = {role: item.cls for role, item in roles.items()}
        self.roles: dict[str, Any] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        for role, item in roles.items():
            with self._running(role, "__init__"):
                self.roles[role] = item()

    def call(self, role: str, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a method of a role."""
        if role not in self.roles:
            raise WorkerError(role, 0, method, "the worker group was shut down")
        with self._running(role, method):
            values = [_value_of(arg) for arg in args]
            result = getattr(self.roles[role], method)(*values, **{k: _value_of(v) for k, v in kwargs.items()})
            return self._run(result) if inspect.iscoroutine(result) else result

    def _run(self, coroutine: Any) -> Any:
        """Run a coroutine on a loop that lives on between calls, in this thread so that breakpoints work."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        return self._loop.run_until_complete(coroutine)

    @contextlib.contextmanager
    def _running(self, role: str, method: str) -> Iterator[None]:
        before = {name: os.environ.get(name) for name in self.environment}
        os.environ.update(self.environment)
        try:
            yield
        except WorkerError:
            raise  # of a worker that this one waited for: the origin is what helps
        except Exception as error:
            raise worker_error(role, 0, method, error, __file__) from error
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def _value_of(argument: Any) -> Any:
    """What a remote call would deliver: a reference arrives as its value. Futures are the method's business."""
    return argument.value if isinstance(argument, Completed) else argument
