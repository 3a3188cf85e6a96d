"""The process behind one rank: a Ray actor that holds one worker object per role."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import socket
import threading
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

import ray

from verl.errors import WorkerError
from verl.single_controller.base import ClassWithInitArgs
from verl.single_controller.base.failure import worker_error
from verl.single_controller.ray.fields import Pieces
from verl.utils.logging import setup_logging
from verl.utils.owned import sweep
from verl.utils.stopping import set_cancel_check
from verl.utils.transport import pack

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class HostInfo:
    """Where a process runs."""

    node_id: str
    ip: str
    pid: int


class WorkerHost:
    """Constructs the roles of one process and runs their methods.

    The process comes up before the roles do, so that every rank's place is known, and in its environment, when user
    code first runs.
    """

    def __init__(self) -> None:
        self._verl_rank = -1
        self._verl_roles: dict[str, Any] = {}
        self._verl_classes: dict[str, type] = {}
        self._verl_port: socket.socket | None = None
        self._verl_loop: asyncio.AbstractEventLoop | None = None

    def verl_info(self) -> HostInfo:
        """Where this process runs."""
        context = ray.get_runtime_context()
        return HostInfo(context.get_node_id(), ray.util.get_node_ip_address(), os.getpid())

    def verl_reserve_port(self) -> tuple[str, int]:
        """This node's address and a port that nobody else is given while this process lives.

        The socket stays bound but never listens, with ``SO_REUSEADDR``: the kernel keeps the port out of the
        automatic range, and the rendezvous server of this process, which sets the same option, can still bind it.
        """
        if self._verl_port is None:
            self._verl_port = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            self._verl_port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._verl_port.bind(("", 0))
        return ray.util.get_node_ip_address(), int(self._verl_port.getsockname()[1])

    def verl_setup(self, environment: Mapping[str, str], roles: Mapping[str, ClassWithInitArgs]) -> None:
        """Set the environment, then construct every role.

        Raises:
            WorkerError: a constructor raised.
        """
        os.environ.update(environment)
        setup_logging("+".join(roles))
        set_cancel_check(_is_cancelled)
        sweep()  # what workers left on this node that were killed
        self._verl_rank = int(environment["RANK"])
        for role, class_with_args in roles.items():
            try:
                self._verl_roles[role] = class_with_args()
            except Exception as error:
                raise self._verl_error(role, "__init__", error) from error
            self._verl_classes[role] = class_with_args.cls

    def verl_classes(self) -> tuple[int, dict[str, type]]:
        """Rank and the roles' classes, for a controller that attaches later."""
        return self._verl_rank, self._verl_classes

    def verl_call(self, _verl_role: str, _verl_method: str, _verl_used: bool, *args: Any, **kwargs: Any) -> Any:
        """Run a method of a role; the result stays here, as None, when it is not used.

        Raises:
            WorkerError: it raised; carries the traceback as text, because exceptions of user code may not pickle.
        """
        try:
            result = getattr(self._verl_roles[_verl_role], _verl_method)(*args, **kwargs)
            if inspect.iscoroutine(result):
                result = self._verl_run(result)
            return pack(result) if _verl_used else None
        except WorkerError:
            raise  # of a worker that this one waited for: the origin is what helps
        except Exception as error:
            raise self._verl_error(_verl_role, _verl_method, error) from error

    def verl_call_with(
        self, _verl_leaves: int, _verl_role: str, _verl_method: str, _verl_used: bool, *args: Any, **kwargs: Any
    ) -> Any:
        """:meth:`verl_call` with batches in pieces: the first arguments are the objects that hold their fields."""
        leaves, rest = args[:_verl_leaves], args[_verl_leaves:]

        def joined(value: Any) -> Any:
            return value.join(leaves) if isinstance(value, Pieces) else value

        return self.verl_call(
            _verl_role,
            _verl_method,
            _verl_used,
            *map(joined, rest),
            **{name: joined(value) for name, value in kwargs.items()},
        )

    def _verl_run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine on the process's one event loop, which lives on between calls as its objects expect."""
        if self._verl_loop is None:
            self._verl_loop = asyncio.new_event_loop()
            threading.Thread(target=self._verl_loop.run_forever, name="worker-loop", daemon=True).start()
        return asyncio.run_coroutine_threadsafe(coroutine, self._verl_loop).result()

    def _verl_error(self, role: str, method: str, error: Exception) -> WorkerError:
        report = worker_error(role, self._verl_rank, method, error, __file__)
        logger.error("%s", report)
        return report


def _is_cancelled() -> bool:
    """Whether the controller has given up the call that this actor works on."""
    return bool(ray.get_runtime_context().is_canceled())


def host_class(roles: Mapping[str, ClassWithInitArgs]) -> type:
    """A :class:`WorkerHost` named after its roles, as Ray's logs and dashboard show it.

    With a single role the actor also has that role's public methods, so ``group.workers[0].method.remote()`` works.
    """
    name = "_".join(class_with_args.cls.__name__ for class_with_args in roles.values())
    members: dict[str, Any] = {"__doc__": WorkerHost.__doc__}
    if len(roles) == 1:
        ((role, only),) = roles.items()
        for method in dir(only.cls):
            if not method.startswith("_") and callable(getattr(only.cls, method)) and not hasattr(WorkerHost, method):
                members[method] = _forward(role, method)
    return type(name, (WorkerHost,), members)


def _forward(role: str, method: str) -> Any:
    def forward(self: WorkerHost, *args: Any, **kwargs: Any) -> Any:
        return self.verl_call(role, method, True, *args, **kwargs)

    forward.__name__ = method
    return forward
