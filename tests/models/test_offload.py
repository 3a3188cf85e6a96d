"""Activations in host memory: the same gradients, and nothing left on the device between the passes."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.workers.engine.reference import POLICY, TEMPERATURE, make_engine, policy_batch, policy_loss
from verl.models.offload import offload_activations
from verl.workers.engine.base import MicroBatching
from verl.workers.engine.fsdp.engine import FSDPEngine

CPU = torch.device("cpu")


class Squared(torch.autograd.Function):
    """Saves its output, which must not make the node keep itself alive."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = x * x
        ctx.save_for_backward(x, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x, out = ctx.saved_tensors
        assert torch.equal(out, x * x)
        return 2 * x * grad


def test_gradients_are_the_same_and_originals_are_freed() -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(64, 64), torch.randn(32, 64)
    (layer(x).tanh() ** 2).sum().backward()
    want, layer.weight.grad = layer.weight.grad, None
    freed: list[Any] = []
    with offload_activations(CPU) as moved:
        hidden = layer(x)
        activated = hidden.tanh()
        freed += [weakref.ref(activated)]
        out = (activated**2).sum()
        del hidden, activated
    gc.collect()
    assert freed[0]() is None
    # the input, the output of tanh twice (for tanh and for the square); not the weight
    assert moved == {"tensors": 3, "bytes": 3 * 32 * 64 * 4}
    out.backward()
    assert torch.equal(layer.weight.grad, want)


def test_a_node_that_saves_its_output_is_freed() -> None:
    for numbers in (4, 4096):
        x = torch.randn(numbers, requires_grad=True)
        with offload_activations(CPU):
            out = Squared.apply(x)
        watch = weakref.ref(out)
        out.sum().backward()
        assert torch.equal(x.grad, 2 * x)
        del out
        assert watch() is None


def step(engine: FSDPEngine) -> dict[str, float]:
    return engine.train_batch(
        policy_batch(), policy_loss, want=POLICY, micro=MicroBatching(size=3), temperature=TEMPERATURE
    ).values_by_name()


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_an_engine_trains_the_same(tiny_model_dir: str, monkeypatch: pytest.MonkeyPatch, compute: str) -> None:
    """bfloat16 computing runs through FSDP. With checkpointing the layers' inputs move, not what is inside layers."""
    want = step(make_engine(tiny_model_dir, compute=compute))
    moved: dict[bool, int] = {}
    for checkpointing in (False, True):
        engine = make_engine(tiny_model_dir, compute=compute, checkpointing=checkpointing)
        moved[checkpointing] = 0

        @contextmanager
        def counted(checkpointing: bool = checkpointing) -> Iterator[None]:
            with offload_activations(CPU, min_numbers=64) as count:
                yield
            moved[checkpointing] += count["bytes"]

        monkeypatch.setattr(engine, "_saved_activations", counted)
        assert step(engine) == pytest.approx(want, rel=1e-6 if compute == "float32" else 1e-3)
    assert 0 < moved[True] < moved[False] / 3


def test_on_a_cpu_there_is_nothing_to_move(tiny_model_dir: str) -> None:
    engine = make_engine(tiny_model_dir, checkpointing=True, model={"enable_activation_offload": True})
    with engine._saved_activations() as moved:
        assert moved is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_device_memory_between_the_passes() -> None:
    device = torch.device("cuda")
    x = torch.randn(1024, 1024, device=device, requires_grad=True)
    before = torch.cuda.memory_allocated()
    with offload_activations(device) as moved:
        out = (x.sin().sin().sin()).sum()
    assert moved["tensors"] == 3
    assert torch.cuda.memory_allocated() - before < x.nbytes
    out.backward()
    torch.testing.assert_close(x.grad, (x.sin().sin().cos() * x.sin().cos() * x.cos()).detach())
