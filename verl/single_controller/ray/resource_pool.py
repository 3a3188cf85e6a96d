"""Which machine a worker process runs on: pools of Ray placement-group bundles.

A pool is a list of *slots*, one for each rank: a bundle that holds one GPU, or a sliver of a CPU. Several worker
groups may use one pool; each gets ``1 / max_colocate_count`` of every slot's GPU. CPU requests are nominal
(:data:`CPU_PER_PROCESS`): worker processes are meant to outnumber cores on a small machine, and a request for whole
cores would wait for ever there.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from verl.errors import ConfigError
from verl.single_controller.base import ResourcePool

#: CPUs that one process asks of Ray
CPU_PER_PROCESS = 0.001


@dataclass
class Slot:
    """One rank's place.

    Attributes:
        group: placement group.
        bundle: index in it.
        tenants: worker processes placed here so far.
    """

    group: PlacementGroup
    bundle: int
    tenants: set[str] = field(default_factory=set)


class RayResourcePool(ResourcePool):
    """Processes on the nodes of a Ray cluster.

    Args:
        process_on_nodes: for each node the number of processes; with GPUs one process per GPU.
        use_gpu: give each process a GPU.
        name_prefix: start of the placement groups' names.
        max_colocate_count: how many worker groups may share the pool.
        detached: the placement groups outlive the program that made them.
        accelerator_type: only nodes with this kind of GPU, by Ray's name, for example ``"H100"``.
        placement_timeout_s: how long to wait for resources that exist but are in use.
    """

    def __init__(
        self,
        process_on_nodes: Sequence[int] | None = None,
        use_gpu: bool = True,
        name_prefix: str | None = None,
        max_colocate_count: int = 10,
        detached: bool = False,
        accelerator_type: str | None = None,
        *,
        placement_timeout_s: float = 120.0,
    ) -> None:
        super().__init__(process_on_nodes, max_colocate_count)
        self.use_gpu = use_gpu
        self.name_prefix = name_prefix if name_prefix is not None else secrets.token_hex(3)
        self.detached = detached
        self.accelerator_type = accelerator_type
        self.placement_timeout_s = placement_timeout_s
        self._slots: list[Slot] | None = None

    @property
    def placed(self) -> bool:
        """Whether the pool holds resources of the cluster already."""
        return self._slots is not None

    def get_placement_groups(self, strategy: str = "STRICT_PACK", name: str | None = None) -> list[PlacementGroup]:
        """The placement groups, one per node, reserved at the first call.

        Raises:
            ConfigError: the cluster lacks nodes or GPUs (at once), or what exists stays in use for too long.
        """
        groups: list[PlacementGroup] = []
        for slot in self.slots(strategy, name):
            if slot.group not in groups:
                groups.append(slot.group)
        return groups

    def slots(self, strategy: str = "STRICT_PACK", name: str | None = None) -> list[Slot]:
        """One slot per rank, reserved at the first call; see :meth:`get_placement_groups`."""
        if self._slots is None:
            self._slots = self._reserve(strategy, name)
        return self._slots

    def release(self) -> None:
        """Give the resources back. Processes that still run in them are killed by Ray."""
        for group in {slot.group.id: slot.group for slot in self._slots or []}.values():
            remove_placement_group(group)
        self._slots = None

    def actor_resources(self) -> dict[str, float]:
        """What one worker process asks of its slot, as options of a Ray actor."""
        return {"num_cpus": CPU_PER_PROCESS, "num_gpus": 1 / self.max_colocate_count if self.use_gpu else 0}

    def claim(self, tenant: str) -> list[Slot]:
        """Take a share of every slot for a worker group.

        Raises:
            ConfigError: ``max_colocate_count`` groups use a slot already; one more would wait for ever.
        """
        slots = self.slots()
        if any(len(slot.tenants) >= self.max_colocate_count for slot in slots):
            raise ConfigError(
                f"{self!r} is shared by max_colocate_count={self.max_colocate_count} worker groups already; raise "
                "max_colocate_count, or put the roles into one group with create_colocated_worker_cls"
            )
        for slot in slots:
            slot.tenants.add(tenant)
        return slots

    def unclaim(self, tenant: str) -> None:
        """Undo :meth:`claim`."""
        for slot in self._slots or []:
            slot.tenants.discard(tenant)

    # ---- reserving ------------------------------------------------------------------------------------------

    def _reserve(self, strategy: str, name: str | None) -> list[Slot]:
        if not self.store:
            raise ConfigError("the resource pool is empty; give process_on_nodes, for example [2] for 2 processes")
        if not ray.is_initialized():
            raise ConfigError("Ray is not running in this process; call ray.init() before making worker groups")
        self._check_cluster()
        bundle: dict[str, float] = {"CPU": CPU_PER_PROCESS * self.max_colocate_count}
        if self.use_gpu:
            bundle["GPU"] = 1
            if self.accelerator_type is not None:
                bundle[f"accelerator_type:{self.accelerator_type}"] = 1e-4
        prefix = f"{name or self.name_prefix}pg"
        groups = [
            placement_group(
                bundles=[dict(bundle) for _ in range(count)],
                strategy=strategy,
                name=f"{prefix}_{index}_{secrets.token_hex(3)}",
                lifetime="detached" if self.detached else None,
            )
            for index, count in enumerate(self.store)
        ]
        for index, group in enumerate(groups):
            if not group.wait(self.placement_timeout_s):
                for other in groups:
                    remove_placement_group(other)
                raise ConfigError(
                    f"no place for node {index} of process_on_nodes={self.store} within "
                    f"{self.placement_timeout_s:g} s: each process asks for {bundle}, the cluster has "
                    f"{_resources(ray.cluster_resources())} of which {_resources(ray.available_resources())} are "
                    "free; end what holds the rest, or ask for less"
                )
        if len(groups) > 1:
            # a stable order of ranks over nodes, whatever order the groups were placed in; sizes must keep their place
            groups = _by_node_within_size(groups, self.store)
        return [Slot(group, bundle) for group, count in zip(groups, self.store, strict=True) for bundle in range(count)]

    def _check_cluster(self) -> None:
        """Refuse at once what cannot come true later either."""
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        if self.accelerator_type is not None:
            nodes = [node for node in nodes if f"accelerator_type:{self.accelerator_type}" in node]
        kind = f" with {self.accelerator_type} GPUs" if self.accelerator_type is not None else ""
        if len(self.store) > len(nodes):
            raise ConfigError(
                f"process_on_nodes={self.store} asks for {len(self.store)} nodes{kind}, the Ray cluster has "
                f"{len(nodes)}; set trainer.nnodes accordingly, add nodes, or name the cluster to join "
                "(ray_kwargs.ray_init.address=auto, or the variable RAY_ADDRESS)"
            )
        if not self.use_gpu:
            return
        gpus = sorted((int(node.get("GPU", 0)) for node in nodes), reverse=True)
        wanted = sorted(self.store, reverse=True)
        if any(want > have for want, have in zip(wanted, gpus, strict=False)):
            raise ConfigError(
                f"process_on_nodes={self.store} asks for {sum(wanted)} GPUs{kind}, the Ray cluster has {sum(gpus)} "
                f"({gpus} on its nodes); lower trainer.n_gpus_per_node or trainer.nnodes, or set trainer.device=cpu"
            )


class _SlotPool(RayResourcePool):
    """A pool over slots that other pools reserved; they stay the owners."""

    def __init__(self, slots: Sequence[Slot], like: RayResourcePool) -> None:
        per_group = Counter(slot.group.id.hex() for slot in slots)
        super().__init__(
            list(per_group.values()),
            use_gpu=like.use_gpu,
            name_prefix=like.name_prefix,
            max_colocate_count=like.max_colocate_count,
            detached=like.detached,
            accelerator_type=like.accelerator_type,
        )
        self._slots = list(slots)

    def release(self) -> None:
        """Forget the slots; the pool that reserved them gives them back."""
        self._slots = None


def merge_resource_pool(rp1: RayResourcePool, rp2: RayResourcePool) -> RayResourcePool:
    """One pool over the slots of both, the first one's ranks first.

    Raises:
        ConfigError: one has GPUs and the other has not, or they are shared by different numbers of groups.
    """
    for name in ("use_gpu", "max_colocate_count", "accelerator_type", "detached"):
        left, right = getattr(rp1, name), getattr(rp2, name)
        if left != right:
            raise ConfigError(f"pools to merge differ in {name}: {left!r} and {right!r}")
    return _SlotPool([*rp1.slots(), *rp2.slots()], like=rp1)


def split_resource_pool(resource_pool: RayResourcePool, split_size: int | Sequence[int]) -> list[RayResourcePool]:
    """Pools over parts of a pool's slots, in rank order.

    Args:
        resource_pool: the pool; it stays the owner of the resources.
        split_size: processes per part, or the size of each part.

    Raises:
        ConfigError: the sizes do not add up to the pool's.
    """
    total = resource_pool.world_size
    if isinstance(split_size, int):
        sizes = [split_size] * (total // split_size if split_size > 0 else 0)
    else:
        sizes = list(split_size)
    if sum(sizes) != total or any(size < 1 for size in sizes):
        raise ConfigError(f"split_size={split_size} does not divide a pool of {total} processes")
    slots = resource_pool.slots()
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return [
        _SlotPool(slots[start : start + size], like=resource_pool) for start, size in zip(starts, sizes, strict=True)
    ]


def _by_node_within_size(groups: list[PlacementGroup], sizes: Sequence[int]) -> list[PlacementGroup]:
    nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}

    def address(group: PlacementGroup) -> list[str]:
        placed_on = next(iter(placement_group_table(group)["bundles_to_node_id"].values()))
        # padded, so that 10.0.0.9 comes before 10.0.0.10
        return [part.zfill(4) for part in nodes.get(placed_on, "").split(".")]

    ordered = list(groups)
    for size in set(sizes):
        places = [index for index, count in enumerate(sizes) if count == size]
        for index, group in zip(places, sorted((groups[i] for i in places), key=address), strict=True):
            ordered[index] = group
    return ordered


def _resources(resources: dict[str, float]) -> str:
    return ", ".join(f"{name} {resources.get(name, 0):g}" for name in ("CPU", "GPU"))
