"""Megatron-core on machines without CUDA: everything that has to be adapted, in one place.

Megatron-core names CUDA in its own modules: ``device="cuda"``, ``torch.cuda.current_device()``, streams, the random
state of the device. Every one of its modules finds these through its global name ``torch``. :func:`adapt_to_cpu`
replaces that name, in Megatron-core's modules only, by a :class:`_TorchView` that answers for the CPU what the module
asks of CUDA and passes everything else through. ``torch`` itself is not touched: other code in the process, such as
Transformers while it loads a model, sees no difference.

Three methods of tensors and modules cannot be reached that way, because they are found on the object: ``cuda()``,
and ``type()``, by which the optimizers recognise a parameter's type. They are replaced while a model or optimizer is
built or read from a checkpoint, see :func:`cpu_construction`.

On CUDA none of this is used.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

CPU = torch.device("cpu")

#: functions that make tensors on a device
_FACTORIES = (
    "arange",
    "as_tensor",
    "empty",
    "empty_like",
    "eye",
    "full",
    "full_like",
    "linspace",
    "ones",
    "ones_like",
    "rand",
    "rand_like",
    "randint",
    "randn",
    "randn_like",
    "tensor",
    "zeros",
    "zeros_like",
)

#: what the engine uses; imported before the names are replaced
_MODULES = (
    "megatron.core",
    "megatron.core.parallel_state",
    "megatron.core.tensor_parallel",
    "megatron.core.transformer",
    "megatron.core.models.gpt",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.models.gpt.moe_module_specs",
    "megatron.core.models.backends",
    "megatron.core.transformer.moe.moe_layer",
    "megatron.core.transformer.multi_latent_attention",
    "megatron.core.distributed",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel",
    "megatron.core.dist_checkpointing",
    "megatron.core.dist_checkpointing.strategies.async_utils",
    "megatron.core.dist_checkpointing.strategies.common",
    "megatron.core.dist_checkpointing.strategies.filesystem_async",
    "megatron.core.dist_checkpointing.strategies.fully_parallel",
    "megatron.core.dist_checkpointing.strategies.state_dict_saver",
    "megatron.core.dist_checkpointing.strategies.torch",
)


class _Stream:
    """A stream or event of a device that runs everything at once, in order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None

    def record_event(self, event: Any = None) -> _Stream:
        return _Stream()

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *error: Any) -> None:
        pass


class _CpuAsCuda(ModuleType):
    """``torch.cuda`` for a process whose device is the CPU."""

    Stream = Event = _Stream

    def __init__(self) -> None:
        super().__init__("torch.cuda")

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)

    def current_device(self) -> torch.device:
        return CPU

    def device_count(self) -> int:
        return 1

    def is_available(self) -> bool:
        return False

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        pass

    set_device = synchronize = empty_cache = reset_peak_memory_stats = _nothing

    def stream(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext(stream)

    def _stream(self, *args: Any) -> _Stream:
        return _Stream()

    current_stream = default_stream = _stream

    def is_current_stream_capturing(self) -> bool:
        return False

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def get_rng_state(self, *args: Any, **kwargs: Any) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, *args: Any, **kwargs: Any) -> None:
        torch.set_rng_state(state)


class _Distributed(ModuleType):
    """``torch.distributed`` where ranks have parts of different length: gloo gathers and scatters equal parts only."""

    def __init__(self) -> None:
        super().__init__("torch.distributed")

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.distributed, name)

    def all_gather(self, tensors: list[Tensor], tensor: Tensor, group: Any = None, **kwargs: Any) -> Any:
        longest = max(len(part) for part in tensors)
        if all(len(part) == longest for part in tensors):
            return torch.distributed.all_gather(tensors, tensor, group=group, **kwargs)
        padded = tensor.new_zeros(longest, *tensor.shape[1:])
        padded[: len(tensor)] = tensor
        everyone = [torch.empty_like(padded) for _ in tensors]
        torch.distributed.all_gather(everyone, padded, group=group)
        for part, received in zip(tensors, everyone, strict=True):
            part.copy_(received[: len(part)])
        return None

    def reduce_scatter(self, output: Tensor, inputs: list[Tensor], group: Any = None, **kwargs: Any) -> Any:
        if len({len(part) for part in inputs}) == 1:
            return torch.distributed.reduce_scatter(output, inputs, group=group, **kwargs)
        whole = torch.cat(inputs)
        torch.distributed.all_reduce(whole, group=group)
        output.copy_(whole.split([len(part) for part in inputs])[torch.distributed.get_rank(group)])
        return None


class _TorchView(ModuleType):
    """``torch`` as Megatron-core's modules see it."""

    def __init__(self) -> None:
        super().__init__("torch")
        self.cuda = _CpuAsCuda()
        self.distributed = _Distributed()
        for name in _FACTORIES:
            setattr(self, name, _on_cpu(getattr(torch, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def device(self, *args: Any, **kwargs: Any) -> torch.device:
        where = args[0] if args else kwargs.get("type", kwargs.get("device"))
        if isinstance(where, int) or (isinstance(where, str) and where.startswith("cuda")):
            return CPU
        return torch.device(*args, **kwargs)


class _TorchViewWithDeviceRng(_TorchView):
    """For the module that keeps the random states: the CPU's generator is the device's, so it is handled once."""

    def get_rng_state(self) -> Tensor:
        return torch.zeros(1, dtype=torch.uint8)

    def set_rng_state(self, state: Tensor) -> None:
        pass


def _on_cpu(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def make(*args: Any, **kwargs: Any) -> Tensor:
        kwargs.pop("pin_memory", None)
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = CPU
        return factory(*args, **kwargs)

    return make


def adapt_to_cpu() -> None:
    """Import Megatron-core and let its modules work on the CPU; may be called again, for modules loaded since."""
    # Small functions are compiled when the package is imported; without a GPU that costs minutes and gains nothing.
    with mock.patch.object(torch, "compile", _plain):
        for name in _MODULES:
            importlib.import_module(name)
    view = _TorchView()
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") and getattr(module, "torch", None) is torch:
            module.torch = view  # type: ignore[attr-defined]
    random = sys.modules["megatron.core.tensor_parallel.random"]
    if not isinstance(random.torch, _TorchViewWithDeviceRng):  # type: ignore[attr-defined]
        random.torch = _TorchViewWithDeviceRng()  # type: ignore[attr-defined]
        random._get_cuda_rng_state = lambda *a, **k: torch.get_rng_state()  # type: ignore[attr-defined]
        random._set_cuda_rng_state = lambda state, *a, **k: torch.set_rng_state(state)  # type: ignore[attr-defined]
    dispatcher = sys.modules["megatron.core.transformer.moe.token_dispatcher"]
    dispatcher.maybe_move_tensor_to_cpu = _on_host  # type: ignore[attr-defined]


def _on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Numbers of tokens for other ranks, in the form that the copy from a device would have."""
    return tensor.numpy() if as_numpy and isinstance(tensor, Tensor) else tensor


def _plain(function: Any = None, **kwargs: Any) -> Any:
    """``torch.compile`` that compiles nothing."""
    return function if function is not None else (lambda f: f)


@contextlib.contextmanager
def cpu_construction() -> Iterator[None]:
    """While active, ``cuda()`` stays on the CPU and CPU tensors name the type of their CUDA counterparts."""
    name_of = Tensor.type

    def type_name(self: Tensor, dtype: Any = None, **kwargs: Any) -> Any:
        if dtype is not None:
            return name_of(self, dtype, **kwargs)
        return str(name_of(self)).replace("torch.", "torch.cuda.", 1)

    def stay(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self

    with (
        mock.patch.object(Tensor, "cuda", stay),
        mock.patch.object(Tensor, "type", type_name),
        mock.patch.object(nn.Module, "cuda", stay),
    ):
        yield
