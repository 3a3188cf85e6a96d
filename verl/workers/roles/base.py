"""What the workers of all roles share: device, process group, seeds, updates, checkpoints."""

from __future__ import annotations

import functools
import logging
import resource
import time
from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import transformers
from tensordict import TensorDict

from verl.config import (
    ActorConfig,
    CheckpointConfig,
    CriticConfig,
    ModelConfig,
    OptimConfig,
    RefConfig,
    RewardModelConfig,
)
from verl.errors import ConfigError
from verl.models.loading import import_external_lib
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.background import BackgroundTask
from verl.utils.device import device_memory_stats, device_name
from verl.utils.distributed import init_process_group
from verl.utils.flops import model_flops_utilization
from verl.utils.metrics import MetricSet, mmax, mmean
from verl.utils.seeding import derive_seed, set_seed, use_deterministic_algorithms
from verl.workers.engine.base import MicroBatching, TrainEngine
from verl.workers.engine.export import export_model
from verl.workers.memory_usage import METER

logger = logging.getLogger(__name__)


#: a section that says how a model is divided over ranks
EngineSection = ActorConfig | RefConfig | CriticConfig | RewardModelConfig


POLICY = frozenset({"log_probs"})


VALUES = frozenset({"values"})


F = TypeVar("F", bound=Callable[..., Any])


def measured(phase: str) -> Callable[[F], F]:
    """Measure the memory of a worker's method as one phase of the step."""

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            with METER.phase(phase, self.device):
                return function(self, *args, **kwargs)

        return cast(F, run)

    return decorate


class RoleWorker(Worker):
    """What all roles share: device, process group, seeds, engines by name, checkpoints.

    Args:
        device: ``"cpu"`` or ``"cuda"``.
        seed: seed of the run; every random choice of the worker derives from it.
        timeout_s: how long a collective may wait for the other workers.
        external_lib: package that registers plug-ins when it is imported.
        deterministic: use only algorithms whose result depends on nothing but their input.
    """

    def __init__(
        self,
        *,
        device: str,
        seed: int,
        timeout_s: float,
        external_lib: str | None = None,
        deterministic: bool = False,
    ) -> None:
        super().__init__()
        if deterministic:
            use_deterministic_algorithms()
        import_external_lib(external_lib)
        transformers.utils.logging.disable_progress_bar()
        self.device = device
        self.seed = seed
        self.updates = 0  # optimizer steps that must have changed weights
        init_process_group(device, timeout_s)
        # the same seed on every rank: a fresh value head must start alike everywhere
        set_seed(derive_seed(seed, "worker"))
        self._saving = BackgroundTask()

    @abstractmethod
    def make_engine(
        self,
        model: ModelConfig,
        section: EngineSection,
        optim: OptimConfig | None,
        *,
        head: str,
        checkpoint: CheckpointConfig | None = None,
    ) -> TrainEngine:
        """Construct (not build) the training engine of this backend.

        Args:
            model: what to load.
            section: the role's section, which holds the engine's own one.
            optim: optimizer; None for a model that is only evaluated.
            head: of the model.
            checkpoint: the role's checkpoint section.
        """

    def join_mesh(self, mesh_name: str, engine: TrainEngine) -> None:
        """Tell the controller which data-parallel shard this worker computes under ``mesh_name``."""
        layout = engine.layout
        self._register_dispatch_collect_info(mesh_name, dp_rank=layout.dp_rank, is_collect=layout.is_output_rank)

    def save_engine(self, engine: TrainEngine, config: CheckpointConfig, path: str) -> None:
        """Write an engine's checkpoint, or with ``async_save`` start to; collective."""
        self._saving.wait()
        if config.async_save:
            self._saving = engine.start_save(Path(path), frozenset(config.save_contents))
        else:
            engine.save(Path(path), frozenset(config.save_contents))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def checkpoint_written(self, wait: bool = False) -> bool:
        """Whether the last ``save_checkpoint`` is on the disk; raises what went wrong since."""
        if wait:
            self._saving.wait()
        return self._saving.done()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def export_model(self, root: str, provenance: dict[str, Any]) -> str:
        """Write the trained model into ``root/huggingface``; returns that directory. Collective."""
        self._saving.wait()
        return str(export_model(self.exported_engine(), Path(root), provenance))

    def exported_engine(self) -> TrainEngine:
        """The engine whose model :meth:`export_model` writes."""
        raise ConfigError(f"{type(self).__name__} has no model to export")

    def memory_metrics(self, engine: TrainEngine) -> MetricSet:
        """Peak memory of this process so far, the largest over ranks after the merge."""
        stats = device_memory_stats(engine.device)
        gib = 1 / 2**30
        return MetricSet(
            {
                "perf/max_memory_allocated_gb": mmax(max(stats.max_allocated, METER.max_allocated) * gib),
                "perf/max_memory_reserved_gb": mmax(max(stats.max_reserved, METER.max_reserved) * gib),
                **{
                    f"perf/memory_{phase}_gb": mmax(nbytes * gib)
                    for phase, nbytes in METER.readings(self.device).items()
                },
                "perf/cpu_memory_used_gb": mmax(stats.cpu_used * gib),
                # Linux counts in KiB
                "perf/cpu_memory_peak_gb": mmax(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 * gib),
            }
        )

    def memory_of(self, **engines: TrainEngine | None) -> dict[str, int]:
        """Measured bytes: what each engine holds as ``"role part"``, and the process in each phase."""
        held = {
            f"{role} {part}": nbytes
            for role, engine in engines.items()
            if engine is not None
            for part, nbytes in engine.state_bytes().items()
        }
        return held | {f"phase {phase}": nbytes for phase, nbytes in METER.readings(self.device).items()}

    def run_update(
        self,
        engine: TrainEngine,
        batch: TensorDict,
        *,
        prefix: str,
        loss: Any,
        mini_batch_size: int,
        epochs: int,
        micro: MicroBatching,
        temperature: float = 1.0,
    ) -> MetricSet:
        """Run ``epochs`` passes of mini-batch updates over this worker's shard.

        The controller has arranged the batch so that the i-th mini-batch of all workers together is the i-th
        global mini-batch. Reported numbers are means over the updates; the learning rate advances once a step.

        Args:
            batch: this worker's rows, a multiple of ``mini_batch_size``.
            mini_batch_size: rows per update on this worker.
        """
        started = time.perf_counter()
        updates = [
            batch[start : start + mini_batch_size]
            for _ in range(epochs)
            for start in range(0, len(batch), mini_batch_size)
        ]
        metrics = MetricSet()
        for index, mini_batch in enumerate(updates):
            step = engine.train_batch(
                mini_batch,
                loss,
                want=loss.want,
                micro=micro,
                temperature=temperature,
                advance_lr=index == len(updates) - 1,
            )
            self.updates += _changes_weights(step)
            for name, metric in step.items():
                full = name if "/" in name else f"{prefix}/{name}"
                as_mean = metric if metric.reduction in ("min", "max") else mmean(metric.value, 1.0)
                metrics.merge({full: as_mean})
        seconds = time.perf_counter() - started
        logger.debug("%s: %d updates in %.2f s", prefix, len(updates), seconds)
        if engine.flops is not None:
            flops = epochs * engine.flops.train(batch["attention_mask"].sum(-1).tolist())
            mfu = model_flops_utilization(flops, seconds, engine.layout.ranks_per_row, device_name(self.device))
            if mfu is not None:
                metrics[f"perf/mfu/{prefix}"] = mmean(mfu, 1.0)
        return metrics.merge(self.memory_metrics(engine))


def _changes_weights(step: MetricSet) -> bool:
    """Whether an optimizer step must have changed weights: it was taken, with a learning rate and a gradient.

    Args:
        step: what ``TrainEngine.train_batch`` returned.
    """
    return step["skipped_steps"].value == 0 and step["lr"].value > 0 and step["grad_norm"].value > 0


class TrainedModelWorker(RoleWorker):
    """A role with one model that it trains: its checkpoints. ``init_model`` makes ``engine``."""

    config: Any
    engine: TrainEngine

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, path: str) -> None:
        """Write the model's checkpoint into directory ``path``. Collective."""
        self.save_engine(self.engine, self.config.checkpoint, path)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, path: str) -> None:
        """Restore the model from directory ``path``. Collective."""
        self.engine.load(Path(path), frozenset(self.config.checkpoint.load_contents))
