"""What a worker group is made of: how many processes where, and which classes they hold."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from verl.errors import ConfigError


class ResourcePool:
    """Processes per node.

    Args:
        process_on_nodes: for each node the number of processes on it.
        max_colocate_count: how many worker groups may share the pool.
    """

    def __init__(self, process_on_nodes: Sequence[int] | None = None, max_colocate_count: int = 10) -> None:
        self._store = list(process_on_nodes or [])
        wrong = [count for count in self._store if not isinstance(count, int) or isinstance(count, bool) or count < 1]
        if wrong:
            raise ConfigError(f"process_on_nodes={self._store}: each node needs at least one process")
        if max_colocate_count < 1:
            raise ConfigError(f"max_colocate_count={max_colocate_count} must be at least 1")
        self.max_colocate_count = max_colocate_count

    @property
    def store(self) -> list[int]:
        """Processes on each node."""
        return self._store

    @property
    def world_size(self) -> int:
        """Processes on all nodes together."""
        return sum(self._store)

    def add_node(self, process_count: int) -> None:
        """Add a node with ``process_count`` processes."""
        self._store.append(process_count)

    def local_world_size_list(self) -> list[int]:
        """For each rank the number of processes on its node."""
        return [count for count in self._store for _ in range(count)]

    def local_rank_list(self) -> list[int]:
        """For each rank its place on its node."""
        return [rank for count in self._store for rank in range(count)]

    def __repr__(self) -> str:
        return f"{type(self).__name__}(process_on_nodes={self._store})"


class ClassWithInitArgs:
    """A class together with the arguments that its workers are constructed with, somewhere else and later.

    Args:
        cls: the worker class.
        args: positional arguments of its constructor.
        kwargs: keyword arguments of its constructor.
    """

    def __init__(self, cls: type, *args: Any, **kwargs: Any) -> None:
        self.cls = cls
        self.args = args
        self.kwargs = kwargs

    def __call__(self) -> Any:
        """Construct the worker in this process."""
        return self.cls(*self.args, **self.kwargs)

    def roles(self, name: str | None = None) -> dict[str, ClassWithInitArgs]:
        """The roles of one process by name; a class alone is one role, called ``name`` or after the class."""
        return {name or snake_case(self.cls.__name__): self}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.cls.__name__})"


class ColocatedClasses(ClassWithInitArgs):
    """Several roles that live in the same processes, each with its own class and arguments.

    Args:
        class_dict: role name -> class with its arguments; constructed in this order.
    """

    def __init__(self, class_dict: Mapping[str, ClassWithInitArgs]) -> None:
        if not class_dict:
            raise ConfigError("colocated roles: class_dict is empty; name at least one role")
        name = "_".join(snake_case(role) for role in class_dict)
        super().__init__(type(name, (), {}))
        self.class_dict = dict(class_dict)

    def __call__(self) -> Any:
        raise TypeError("several roles are not one object; construct them through a worker group")

    def roles(self, name: str | None = None) -> dict[str, ClassWithInitArgs]:
        """Role name -> class with its arguments; ``name`` is not used, the roles have their own."""
        return dict(self.class_dict)


def snake_case(name: str) -> str:
    """``ActorRolloutRefWorker`` -> ``actor_rollout_ref``."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower().strip("_")
    return words.removesuffix("_worker") or words
