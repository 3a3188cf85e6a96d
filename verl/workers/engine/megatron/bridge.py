"""Weights between Hugging Face checkpoints and Megatron-core's model, both ways, one tensor at a time.

Names on the Hugging Face side are those of Transformers' modules, in its order; experts are stacked there, and one by
one in most checkpoint files. What belongs to what is in :mod:`~verl.workers.engine.megatron.weights`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedConfig

from verl.errors import ConfigError
from verl.models.lora import merged
from verl.workers.engine.base import ParallelLayout, SlicedWeight
from verl.workers.engine.megatron.slices import WeightPlace, sliced_weights
from verl.workers.engine.megatron.weights import AdapterWeights, Weight, weight_table

# ---- files ------------------------------------------------------------------------------------------------------


class CheckpointFiles:
    """The tensors of a Hugging Face model directory, each read when asked for.

    Args:
        directory: with ``*.safetensors``, or PyTorch files, which are read whole.

    Raises:
        ConfigError: there are no weights.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._file_of: dict[str, Path] = {}
        self._open: dict[Path, Any] = {}
        index = sorted(directory.glob("*.index.json"))
        files = sorted(directory.glob("*.safetensors")) or sorted(directory.glob("pytorch_model*.bin"))
        if not files:
            raise ConfigError(f"{directory} holds no *.safetensors and no pytorch_model*.bin to read weights from")
        if index:
            weight_map: dict[str, str] = json.loads(index[0].read_text())["weight_map"]
            self._file_of = {name: directory / file for name, file in weight_map.items()}
        else:
            for file in files:
                self._file_of |= dict.fromkeys(self._names(file), file)

    def _names(self, file: Path) -> list[str]:
        handle = self._handle(file)
        return list(handle.keys())

    def _handle(self, file: Path) -> Any:
        if file not in self._open:
            if file.suffix == ".safetensors":
                from safetensors import safe_open

                self._open[file] = safe_open(file, framework="pt")
            else:
                self._open[file] = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        return self._open[file]

    def _find(self, name: str) -> str | None:
        """The name in the files; a bare backbone is stored without the prefix."""
        return next((n for n in (name, name.removeprefix("model.")) if n in self._file_of), None)

    def __contains__(self, name: str) -> bool:
        return self._find(name) is not None

    def get(self, name: str) -> Tensor:
        """One tensor, on the host.

        Raises:
            ConfigError: there is none of that name.
        """
        stored = self._find(name)
        if stored is None:
            raise ConfigError(
                f"{self.directory} has no weight {name!r}; its files do not belong to the model type in its config.json"
            )
        handle = self._handle(self._file_of[stored])
        tensor: Tensor = handle.get_tensor(stored) if hasattr(handle, "get_tensor") else handle[stored]
        return tensor


# ---- the bridge -------------------------------------------------------------------------------------------------


def hugging_face_shell(config: PreTrainedConfig, head: str) -> tuple[nn.Module, str]:
    """Transformers' model without memory and without the head of a critic, and what its names lack at their start."""
    with torch.device("meta"):
        if head == "lm":
            return AutoModelForCausalLM.from_config(config), ""
        return AutoModel.from_config(config), "model."


def hugging_face_names(config: PreTrainedConfig, head: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes of Transformers' parameters and stored buffers, tied ones once, in its order."""
    model, prefix = hugging_face_shell(config, head)
    found = {prefix + name: tuple(p.shape) for name, p in model.named_parameters()}
    for name, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and key not in module._non_persistent_buffers_set:
                found[f"{prefix}{name}.{key}"] = tuple(buffer.shape)
    return found


class Bridge:
    """Moves weights between one model on this group of ranks and its Hugging Face form.

    Args:
        config: of the Hugging Face model.
        chunks: this rank's pieces of the model.
        layout: where this rank stands.
        head: ``"lm"``, ``"value"`` or ``"classifier"``.
        outputs: outputs of a head that is not a language model's.
        multiple_of: see :class:`~verl.workers.engine.megatron.tensor_layouts.Vocabulary`.
        grouped: experts of a rank are one module.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        chunks: Sequence[Any],
        layout: ParallelLayout,
        *,
        head: str,
        outputs: int,
        multiple_of: int,
        grouped: bool,
    ) -> None:
        from megatron.core import parallel_state

        self.layout = layout
        self.tp_group = parallel_state.get_tensor_model_parallel_group()
        self.pp_group = parallel_state.get_pipeline_model_parallel_group()
        self.ep_group = parallel_state.get_expert_model_parallel_group()
        self.etp_group = parallel_state.get_expert_tensor_parallel_group()
        self.chunks = chunks
        self.local = _local_weights(chunks)
        self.table = weight_table(config, head=head, multiple_of=multiple_of, grouped=grouped)
        self.shapes = hugging_face_names(config, head)
        if head != "lm":
            self.shapes["score.weight"] = (outputs, config.hidden_size)
            if any("output_layer.bias" in names for names in self._on_every_stage({"output_layer.bias"})):
                self.shapes["score.bias"] = (outputs,)
            else:
                self.table.pop()
        self._check_table()
        self.tied = head == "lm" and bool(config.tie_word_embeddings)
        self.adapters: dict[str, AdapterWeights] = {}
        self._adapter_shapes: dict[str, tuple[int, ...]] = {}
        self._maker = {name: (weight, i) for weight in self.table for i, name in enumerate(weight.hf)}
        self._owners = self._find_owners()

    def _on_every_stage(self, names: set[str]) -> list[set[str]]:
        """Which of ``names`` each pipeline stage has."""
        found: list[Any] = [None] * self.layout.pp_size
        dist.all_gather_object(found, names & set(self.local), group=self.pp_group)
        return found

    def _check_table(self) -> None:
        mine = {name for weight in self.table for name in weight.hf}
        if mine != set(self.shapes):
            lacking, extra = sorted(set(self.shapes) - mine), sorted(mine - set(self.shapes))
            raise ConfigError(
                f"this model has weights that the Megatron engine does not know: {lacking[:3]}"
                + (f"; and lacks {extra[:3]}" if extra else "")
                + "; use strategy=fsdp"
            )

    def _find_owners(self) -> dict[str, tuple[int, torch.dtype]]:
        """Megatron name -> (first pipeline stage that has it, its dtype)."""
        mine = {name: tensor.dtype for name, tensor in self.local.items()}
        stages: list[Any] = [None] * self.layout.pp_size
        dist.all_gather_object(stages, mine, group=self.pp_group)
        owners: dict[str, tuple[int, torch.dtype]] = {}
        for stage, names in enumerate(stages):
            for name, dtype in names.items():
                owners.setdefault(name, (stage, dtype))
        return owners

    def adopt(self, adapters: dict[str, AdapterWeights], shapes: dict[str, tuple[int, ...]]) -> None:
        """Know the adapters that have been put beside weights since. Collective.

        Args:
            adapters: by the Megatron name of the weight.
            shapes: of their Hugging Face tensors.
        """
        self.adapters, self._adapter_shapes = adapters, shapes
        self.local = _local_weights(self.chunks)
        self._owners = self._find_owners()

    # ---- Hugging Face to Megatron

    @torch.no_grad()
    def load(self, files: CheckpointFiles, *, optional: frozenset[str] = frozenset()) -> list[str]:
        """Fill this rank's weights.

        Args:
            files: to read.
            optional: Hugging Face names that may be missing; their weights are set to zero.

        Returns:
            Those of ``optional`` that were missing.
        """
        missing = []
        for weight in self.table:
            for name, tensor in self._held(weight):
                absent = [n for n in weight.hf if n in optional and n not in files]
                if absent:
                    missing += absent
                    tensor.zero_()
                    continue
                tensor.copy_(self._part(weight, name, files))
        if self.tied and "output_layer.weight" in self.local:
            embedding = self.table[0]
            self.local["output_layer.weight"].copy_(self._part(embedding, embedding.megatron, files))
        return missing

    def _held(self, weight: Weight) -> Iterator[tuple[str, Tensor]]:
        """This rank's tensors of a weight; several for experts."""
        if not weight.experts:
            if weight.megatron in self.local:
                yield weight.megatron, self.local[weight.megatron]
            return
        for number in range(weight.experts // self.layout.ep_size):
            name = weight.megatron.format(expert=number)
            if name in self.local:
                yield name, self.local[name]

    def _part(self, weight: Weight, name: str, files: CheckpointFiles) -> Tensor:
        if not weight.experts:
            tensors = [files.get(n) for n in weight.hf]
            return weight.form.shard(tensors, self.layout.tp_rank, self.layout.tp_size)
        per_rank = weight.experts // self.layout.ep_size
        local = next(i for i in range(per_rank) if weight.megatron.format(expert=i) == name)
        expert = self.layout.ep_rank * per_rank + local
        rank, ranks = self.etp_group.rank(), self.etp_group.size()
        if weight.hf[0] in files:
            return weight.form.shard([files.get(weight.hf[0])[expert]], rank, ranks)
        assert weight.file_form is not None
        return weight.file_form.shard([files.get(n.format(expert=expert)) for n in weight.files], rank, ranks)

    # ---- Megatron to Hugging Face

    def shards(self) -> dict[str, SlicedWeight]:
        """This rank's slices of every Hugging Face tensor, where they are."""
        layout = self.layout
        place = WeightPlace(
            tp=(layout.tp_rank, layout.tp_size),
            ep=(layout.ep_rank, layout.ep_size),
            etp=(self.etp_group.rank(), self.etp_group.size()),
        )
        dtypes = {name: dtype for name, (_, dtype) in self._owners.items()}
        return sliced_weights(self.table, self.shapes, dtypes, self.local, place, tied=self.tied)

    def export(self, *, merge: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Hugging Face names and whole tensors, in Transformers' order. Collective: every rank draws all of them.

        Args:
            merge: add adapters to the weights that they belong to.
        """
        ready: dict[str, Tensor] = {}
        for name in self.shapes:
            if name not in ready:
                weight, _ = self._maker[name]
                ready.update(zip(weight.hf, self._whole(weight, merge=merge), strict=True))
            yield name, ready.pop(name)

    def export_adapters(self) -> Iterator[tuple[str, Tensor]]:
        """Whole adapter matrices by the names they have beside Transformers' layers. Collective, as :meth:`export`."""
        for adapter in self.adapters.values():
            for weight in (adapter.a, adapter.b):
                yield from zip(weight.hf, self._whole(weight), strict=True)

    @torch.no_grad()
    def _whole(self, weight: Weight, *, merge: bool = False) -> list[Tensor]:
        """The Hugging Face tensors of one weight on every rank, with ``merge`` its adapters added."""
        stage, dtype = self._owners[weight.megatron.format(expert=0)]
        if self.layout.pp_rank == stage:
            tensors = self._joined_experts(weight) if weight.experts else self._joined(weight)
            if merge and weight.megatron in self.adapters:
                tensors = self._merged(tensors, self.adapters[weight.megatron])
        else:
            device = next(iter(self.local.values())).device
            shapes = self.shapes | self._adapter_shapes
            tensors = [torch.empty(shapes[name], dtype=dtype, device=device) for name in weight.hf]
        if self.layout.pp_size > 1:
            source = dist.get_global_rank(self.pp_group, stage)
            tensors = [tensor.contiguous() for tensor in tensors]
            for tensor in tensors:
                dist.broadcast(tensor, source, group=self.pp_group)
        return tensors

    def _joined(self, weight: Weight) -> list[Tensor]:
        local = self.local[weight.megatron].detach()
        return weight.form.join([local] if weight.form.replicated else _gathered(local, self.tp_group))

    def _merged(self, tensors: list[Tensor], adapter: AdapterWeights) -> list[Tensor]:
        a, b = self._joined(adapter.a), self._joined(adapter.b)
        tensors = list(tensors)
        for number, index in enumerate(adapter.chosen):
            tensors[index] = merged(tensors[index], a[number], b[number], adapter.scaling)
        return tensors

    def _joined_experts(self, weight: Weight) -> list[Tensor]:
        local = torch.stack([tensor.detach() for _, tensor in self._held(weight)])
        parts = _gathered(local, self.etp_group)
        mine = torch.stack([weight.form.join([part[i] for part in parts])[0] for i in range(local.shape[0])])
        return [torch.cat(_gathered(mine, self.ep_group))]


def _local_weights(chunks: Sequence[Any]) -> dict[str, Tensor]:
    """Parameters and stored buffers of this rank's pieces, with layers counted over the whole model."""
    return {_counted(chunk, name): tensor for chunk in chunks for name, tensor in _stored(chunk)}


def local_modules(chunks: Sequence[Any]) -> dict[str, nn.Module]:
    """Modules of this rank's pieces, with layers counted over the whole model."""
    return {_counted(chunk, name): module for chunk in chunks for name, module in chunk.named_modules()}


def _counted(chunk: Any, name: str) -> str:
    """A name within a piece as it is in the whole model."""
    prefix = "decoder.layers."
    if not name.startswith(prefix):
        return name
    number, dot, rest = name.removeprefix(prefix).partition(".")
    return f"{prefix}{chunk.decoder.layers[int(number)].layer_number - 1}{dot}{rest}"


def _stored(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    for name, child in module.named_modules():
        for key, buffer in child._buffers.items():
            if buffer is not None and key not in child._non_persistent_buffers_set:
                yield (f"{name}.{key}" if name else key), buffer


def _gathered(tensor: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """The tensors of all ranks of a group, in order."""
    if group.size() == 1:
        return [tensor]
    tensor = tensor.contiguous()
    everyone = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(everyone, tensor, group=group)
    return everyone
