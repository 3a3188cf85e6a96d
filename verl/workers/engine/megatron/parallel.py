"""Megatron-core's process groups, made from the configuration.

Megatron-core keeps its groups in module globals, so all Megatron engines of a process share one set of sizes.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from verl.errors import ConfigError
from verl.workers.engine.base import ParallelLayout

if TYPE_CHECKING:
    from verl.config import MegatronConfig

logger = logging.getLogger(__name__)

#: the sizes in force, and the default process group that they divide
_current: tuple[ParallelSizes, Any] | None = None


@dataclass(frozen=True)
class ParallelSizes:
    """Sizes of Megatron's parallel dimensions.

    Attributes:
        tp, pp, cp: tensor, pipeline and context parallel.
        vpp: virtual stages per pipeline stage; None without interleaving.
        ep, etp: expert parallel, and tensor parallel within an expert.
    """

    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    cp: int = 1
    ep: int = 1
    etp: int = 1

    @classmethod
    def of(cls, config: MegatronConfig) -> ParallelSizes:
        """Read the sizes from the section; experts are cut like everything else unless told otherwise."""
        etp = config.expert_tensor_parallel_size
        return cls(
            tp=config.tensor_model_parallel_size,
            pp=config.pipeline_model_parallel_size,
            vpp=config.virtual_pipeline_model_parallel_size,
            cp=config.context_parallel_size,
            ep=config.expert_model_parallel_size,
            etp=config.tensor_model_parallel_size if etp is None else etp,
        )


def load_megatron(device: torch.device) -> None:
    """Import Megatron-core, adapted where there is no CUDA.

    Raises:
        ConfigError: it is not installed.
    """
    # It tells at length which optional packages it does without, and calls things of torch by their former names.
    warnings.filterwarnings("ignore", module=r"megatron\.core")
    warnings.filterwarnings("ignore", category=FutureWarning, message="Please use DTensor instead")
    warnings.filterwarnings("ignore", category=FutureWarning, message=r".torch\.distributed\.\w+. is deprecated")
    try:
        if device.type == "cpu":
            from verl.workers.engine.megatron.cpu import adapt_to_cpu

            adapt_to_cpu()
        else:
            import megatron.core  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"strategy=megatron needs Megatron-core ({error}); install it with pip install 'verl[megatron]', or use "
            "strategy=fsdp"
        ) from error
    if importlib.util.find_spec("transformer_engine") is None:
        _do_without_transformer_engine()


def _do_without_transformer_engine() -> None:
    """Correct modules of Megatron-core 0.16 that take their own wrapper of Transformer Engine for the thing itself."""
    import megatron.core.transformer.moe.moe_utils as experts
    import megatron.core.transformer.multi_latent_attention  # noqa: F401

    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core.transformer") and getattr(module, "HAVE_TE", False):
            module.HAVE_TE = False  # type: ignore[attr-defined]
    if not hasattr(experts, "te_general_gemm"):
        experts.te_general_gemm = None
    _keep_step_counters()


def _keep_step_counters() -> None:
    """Let the distributed optimizer read its state back where torch's AdamW keeps a step counter with it.

    Its saved form has the counter apart from the state of each parameter, and reading the state then misses it.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    restore = DistributedOptimizer._set_main_param_and_optimizer_states
    if restore.__name__ == "with_step":
        return

    def with_step(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        if "step" not in tensors:
            current = self._get_main_param_and_optimizer_states(model_param)
            tensors |= {"step": current["step"]} if "step" in current else {}
        restore(self, model_param, tensors)

    DistributedOptimizer._set_main_param_and_optimizer_states = with_step


def construction(device: torch.device) -> AbstractContextManager[Any]:
    """The context in which Megatron-core builds models and optimizers for ``device``."""
    if device.type != "cpu":
        return nullcontext()
    from verl.workers.engine.megatron.cpu import cpu_construction

    return cpu_construction()


def join_parallel_groups(config: MegatronConfig, device: torch.device, seed: int) -> ParallelSizes:
    """Make Megatron's process groups, once per process. The default process group must exist.

    Raises:
        ConfigError: the sizes do not divide the world, or differ from those another engine of this process uses.
    """
    global _current
    load_megatron(device)
    from megatron.core import parallel_state, tensor_parallel

    sizes = ParallelSizes.of(config)
    if _current is not None and _current[1] is not dist.group.WORLD:
        leave_parallel_groups()  # the process has joined another group since
    if _current is not None:
        if sizes != _current[0]:
            raise ConfigError(
                f"the megatron sections ask for {sizes}, but another role in the same process has {_current[0]}; all "
                "Megatron roles of a worker share their parallel sizes"
            )
        return sizes
    world = dist.get_world_size()
    for what, size in (
        ("tensor * pipeline * context", sizes.tp * sizes.pp * sizes.cp),
        ("expert_model * expert_tensor * pipeline", sizes.ep * sizes.etp * sizes.pp),
    ):
        if world % size:
            raise ConfigError(f"megatron: {what} parallel sizes make {size}, which does not divide the {world} ranks")
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=sizes.tp,
        pipeline_model_parallel_size=sizes.pp,
        virtual_pipeline_model_parallel_size=sizes.vpp,
        context_parallel_size=sizes.cp,
        expert_model_parallel_size=sizes.ep,
        expert_tensor_parallel_size=sizes.etp,
        create_gloo_process_groups=device.type != "cpu",  # on CPU every group is one already
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    _current = (sizes, dist.group.WORLD)
    return sizes


def leave_parallel_groups() -> None:
    """Forget Megatron's groups, so that other sizes can be used; engines made with them are of no use any more."""
    global _current
    if _current is None:
        return
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    _current = None


def current_layout() -> ParallelLayout:
    """Where this process stands in Megatron's groups; context-parallel ranks are those that share a sequence."""
    from megatron.core import parallel_state as ps

    tp, pp, cp = (
        ps.get_tensor_model_parallel_rank(),
        ps.get_pipeline_model_parallel_rank(),
        ps.get_context_parallel_rank(),
    )
    pp_size = ps.get_pipeline_model_parallel_world_size()
    return ParallelLayout(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        dp_rank=ps.get_data_parallel_rank(),
        dp_size=ps.get_data_parallel_world_size(),
        sp_rank=cp,
        sp_size=ps.get_context_parallel_world_size(),
        tp_rank=tp,
        tp_size=ps.get_tensor_model_parallel_world_size(),
        pp_rank=pp,
        pp_size=pp_size,
        ep_rank=ps.get_expert_model_parallel_rank(),
        ep_size=ps.get_expert_model_parallel_world_size(),
        is_output_rank=tp == 0 and cp == 0 and pp == pp_size - 1,
    )
