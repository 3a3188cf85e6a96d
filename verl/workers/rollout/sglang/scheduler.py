"""What is added to SGLang's scheduler processes, where the model and its cache live.

- the built-in engine's sampler and repetition penalty (``sampler.py``);
- every end-of-sequence token comes with the request, so that a request can ignore the model's own;
- a note of where each weight was loaded to, so that what generation uses can be compared with the trainer's;
- on CPUs, the release of memory, which SGLang has on GPUs only.

The questions for weights and memory come through SGLang's ``/weights_checker``, which asks every tensor-parallel rank.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from verl.utils.memory_release import forget_pages
from verl.utils.tokenizer import unsampled_tokens
from verl.workers.rollout.policy_weights import CopyRecorder, Named, Place, digest, split_adapter
from verl.workers.rollout.sglang.lora import AdapterPool, pool_tensors
from verl.workers.rollout.sglang.sampler import deliver_seeds, penalise_prompts, replace_sampler

#: what ``/weights_checker`` can be asked beyond SGLang's own actions
DIGESTS, MEMORY = "verl_digests", "verl_memory"


def run_scheduler(*args: Any, **kwargs: Any) -> None:
    """SGLang's scheduler process with verl's parts."""
    from sglang.srt.managers.scheduler import run_scheduler_process

    replace_sampler(_unsampled_of(args[0] if args else kwargs["server_args"]))
    deliver_seeds()
    penalise_prompts()
    _stop_only_where_asked()
    _answer_questions()
    _release_on_cpus()
    _pin_where_possible()
    run_scheduler_process(*args, **kwargs)


def _unsampled_of(server: Any) -> Callable[[int], Sequence[int]]:
    """Size of the vocabulary -> tokens without text, by SGLang's ``ServerArgs``."""
    tokenizer = None if server.tokenizer_path == server.model_path else server.tokenizer_path
    return partial(unsampled_tokens, server.model_path, tokenizer, bool(server.trust_remote_code))


# ---------------------------------------------------------------------------- weights


class LoadedWeights:
    """Stands before a model's ``load_weights`` and notes where each weight goes.

    Args:
        runner: SGLang's model runner, whose model is loaded.
    """

    def __init__(self, runner: Any) -> None:
        model = runner.model
        self.runner = runner
        self.model = model
        self.places: dict[str, tuple[Place, ...] | None] = {}
        self._sizes: dict[str, int] = {}  # numbers in a weight
        self._shapes: dict[str, torch.Size] = {}  # of the model's tensors when weights were noted
        self.adapters: AdapterPool | None = None
        self._load: Callable[..., Any] = model.load_weights
        model.load_weights = self.load

    @torch.no_grad()
    def load(self, weights: Iterable[Named], *args: Any, **kwargs: Any) -> Any:
        """Load weights, and note the places of those that were never seen before.

        Raises:
            ValueError: the model has no place for one of them.
        """
        known: list[Named] = []
        weights, adapter = split_adapter(weights)
        for name, tensor in weights:
            if name in self.places:
                known.append((name, tensor))
            else:
                self._note(name, tensor.detach().contiguous(), *args, **kwargs)
        result = self._load(known, *args, **kwargs) if known else None
        if adapter:
            if self.adapters is None:
                self.adapters = AdapterPool(self.runner.lora_manager, self.places)
            self.adapters.load(adapter)
        return result

    def _note(self, name: str, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        owners: dict[int, tuple[str, Any]] = {}
        for owner, item in self._tensors().items():
            owners.setdefault(item.untyped_storage()._cdata, (owner, item.storage_offset()))
        with CopyRecorder(owners, tensor, write=True) as recorder:
            self._load([(name, tensor)], *args, **kwargs)
        if not recorder.places:
            raise ValueError(
                f"SGLang's {type(self.model).__name__} has no place for weight {name!r}; it serves the model in "
                "another form than Transformers trains it"
            )
        self.places[name] = tuple(recorder.places) if recorder.plain else None
        self._sizes[name] = tensor.numel()
        for place in recorder.places:
            self._shapes[place.owner] = self._tensors()[place.owner].shape

    def digests(self, dtype: torch.dtype) -> dict[str, str]:
        """Per weight, a JSON object: ``digest`` of what generation uses here, and which ``parts`` of the weight it is.

        The parts are null where this device has the whole weight; else each is size, stride and offset of a view of
        the contiguous weight. Weights that SGLang changes on their way are left out.

        Raises:
            ValueError: a weight has been converted after loading.
        """
        tensors = self._tensors()
        found: dict[str, str] = {}
        for name, places in self.places.items():
            if not places:
                continue
            values = [self._view(name, tensors[place.owner].detach(), place) for place in places]
            parts = [(place.size, place.source_stride, place.source_offset) for place in places]
            if sum(value.numel() for value in values) == self._sizes[name]:
                whole = values[0].new_empty(self._sizes[name])
                for part, value in zip(parts, values, strict=True):
                    whole.as_strided(*part).copy_(value)
                found[name] = json.dumps({"digest": digest([whole], dtype), "parts": None})
            else:
                found[name] = json.dumps({"digest": digest(values, dtype), "parts": parts})
        return found if self.adapters is None else found | self.adapters.digests(dtype)

    def _view(self, name: str, tensor: torch.Tensor, place: Place) -> torch.Tensor:
        if tensor.shape != self._shapes[place.owner]:
            raise ValueError(
                f"{type(self.model).__name__} converts weight {name!r} after loading; checksums cannot be compared "
                "with the trainer's: unset VERL_SYNC_CHECK"
            )
        return tensor.as_strided(place.size, place.stride, tensor.storage_offset() + place.offset)

    def _tensors(self) -> dict[str, torch.Tensor]:
        return dict(self.model.state_dict(keep_vars=True))


def _answer_questions() -> None:
    from sglang.srt.model_executor.model_runner import ModelRunner

    def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = load(self, *args, **kwargs)
        self.verl_weights = LoadedWeights(self)
        return result

    def check_weights(self: Any, action: str, *args: Any, role: str, **kwargs: Any) -> Any:
        if action == DIGESTS:
            answer = self.verl_weights.digests(self.dtype)
        elif action == MEMORY:
            answer = {
                "kv_cache": str(sum(storage.nbytes() for storage in cache_storages(self))),
                "weights": str(sum(storage.nbytes() for storage in weight_storages(self))),
            }
        else:
            return check(self, action, *args, role=role, **kwargs)
        place = self._weight_checker._parallelism_info(role=role)
        return {"checksums": answer, "parallelism_info": place.model_dump()}

    load, check = ModelRunner.load_model, ModelRunner.check_weights
    ModelRunner.load_model, ModelRunner.check_weights = load_model, check_weights


# ---------------------------------------------------------------------------- memory


def weight_storages(runner: Any) -> list[torch.UntypedStorage]:
    """The memory of a model runner's weights and of its adapters."""
    return _distinct([*(parameter.data for parameter in runner.model.parameters()), *pool_tensors(runner)])


def cache_storages(runner: Any) -> list[torch.UntypedStorage]:
    """The memory of a model runner's key-value cache."""
    return _distinct(_tensors_in(vars(runner.token_to_kv_pool), depth=3))


def _distinct(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    return list({t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}.values())


def _tensors_in(value: Any, depth: int) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, dict):
        for item in value.values():
            yield from _tensors_in(item, depth - 1)
    elif depth and isinstance(value, list | tuple):
        for item in value:
            yield from _tensors_in(item, depth - 1)


def _release_on_cpus() -> None:
    """``/release_memory_occupation`` frees memory on CPUs too; weights are dropped there, not kept."""
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager as Manager

    def release_memory_occupation(self: Any, request: Any) -> Any:
        answer = release(self, request)
        runner = self.tp_worker.model_runner
        if runner.device == "cpu":
            if _asks_for(request, "kv_cache"):
                for storage in cache_storages(runner):
                    forget_pages(storage)
            if _asks_for(request, "weights"):
                sizes[id(self)] = [(storage, storage.nbytes()) for storage in weight_storages(runner)]
                for storage, _ in sizes[id(self)]:
                    storage.resize_(0)
        return answer

    def resume_memory_occupation(self: Any, request: Any) -> Any:
        if _asks_for(request, "weights"):
            dropped = sizes.pop(id(self), [])
            for storage, nbytes in dropped:
                storage.resize_(nbytes)
            for tensor in pool_tensors(self.tp_worker.model_runner) if dropped else ():
                tensor.zero_()  # not all of it is written
        return resume(self, request)

    sizes: dict[int, list[tuple[torch.UntypedStorage, int]]] = {}
    release, resume = Manager.release_memory_occupation, Manager.resume_memory_occupation
    Manager.release_memory_occupation = release_memory_occupation
    Manager.resume_memory_occupation = resume_memory_occupation


def _asks_for(request: Any, tag: str) -> bool:
    return not request.tags or tag in request.tags


def _pin_where_possible() -> None:
    """SGLang's adapters ask for pinned memory, which torch refuses on a machine without an accelerator."""
    if torch.accelerator.is_available():
        return

    def unpinned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda *args, pin_memory=False, **kwargs: make(*args, **kwargs)

    for name in ("tensor", "zeros", "empty"):
        setattr(torch, name, unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self  # type: ignore[method-assign]


# ---------------------------------------------------------------------------- stopping


def _stop_only_where_asked() -> None:
    """Forget the model's end-of-sequence tokens: ``ignore_eos`` would switch the request's own stop tokens off too."""
    from sglang.srt.configs.model_config import ModelConfig

    ModelConfig._get_hf_eos_token_id = lambda self: set()
