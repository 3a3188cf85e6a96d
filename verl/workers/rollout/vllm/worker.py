"""What is added to vLLM's worker: new weights, and on CPUs the release of memory, which vLLM does not have there."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from verl.utils.memory_release import forget_pages
from verl.workers.rollout.policy_weights import Named, WeightManifest, split_adapter
from verl.workers.rollout.types import WeightPart
from verl.workers.rollout.vllm.lora import AdapterSlots, base_layers
from verl.workers.rollout.vllm.weights import ModelWeights

#: what vLLM imports
EXTENSION = "verl.workers.rollout.vllm.worker.WorkerExtension"


class WorkerExtension:
    """Mixed into vLLM's worker class; ``collective_rpc`` calls its methods on every rank."""

    model_runner: Any
    vllm_config: Any
    use_v2_model_runner: bool

    def verl_attach(self, manifest: WeightManifest, dtype: torch.dtype, pack: bool) -> bool:
        """Take charge of the weights of the model that was loaded; whether they are updated in place."""
        model = self.model_runner.get_model()
        self._verl_slots: AdapterSlots | None = None
        with base_layers(model):
            self._verl_weights = ModelWeights(
                model, self.vllm_config.model_config, manifest=manifest, dtype=dtype, pack=pack
            )
        self._verl_cache_held = True
        if not self.use_v2_model_runner:  # the other one draws by seed and position itself
            self.model_runner.sampler.register_forward_pre_hook(self._verl_place_random_streams)
        return self._verl_weights.in_place

    def verl_attach_adapter(self, shapes: Mapping[str, torch.Size], scaling: float, dtype: torch.dtype) -> str | None:
        """Take charge of the policy's adapter; returns why it cannot be served apart from the weights, if so.

        Args:
            shapes: whole adapter matrices by name.
            scaling: of the adapter's output.
            dtype: of the weights.
        """
        if not self._verl_weights.in_place:
            return "it converts the model's weights after loading"
        manager = self.model_runner.lora_manager._adapter_manager
        with self._verl_config():
            slots = AdapterSlots(
                self._verl_weights.model, manager, self._verl_weights, shapes=shapes, scaling=scaling, dtype=dtype
            )
        self._verl_slots = slots if slots.problem is None else None
        return slots.problem

    def verl_never_sample(self, tokens: Sequence[int]) -> None:
        """Give tokens the probability 0 in whatever is sampled from here on."""
        model: Any = self._verl_weights.model
        compute = model.compute_logits

        def compute_logits(*args: Any, **kwargs: Any) -> torch.Tensor | None:
            logits: torch.Tensor | None = compute(*args, **kwargs)  # of some ranks alone
            if logits is not None:
                logits = logits.index_fill(-1, never.to(logits.device), float("-inf"))
            return logits

        never = torch.tensor(tokens, device=next(model.parameters()).device)
        model.compute_logits = compute_logits

    def _verl_place_random_streams(self, *_: Any) -> None:
        """Before tokens are drawn: let each one's random numbers be a function of its seed and its position.

        vLLM lets a request's generator run on from token to token. A completion that is continued in another request
        would begin the stream again, and use the numbers of its first tokens twice.
        """
        batch, requests = self.model_runner.input_batch, self.model_runner.requests
        for row, generator in batch.generators.items():
            seed = requests[batch.req_ids[row]].sampling_params.seed
            generator.manual_seed(stream_seed(seed, int(batch.num_tokens_no_spec[row])))

    def verl_begin_update(self) -> None:
        """See :meth:`ModelWeights.begin`."""
        with self._verl_config():
            self._verl_weights.begin()

    def verl_load(self, bucket: Iterable[Named]) -> None:
        """See :meth:`ModelWeights.load`."""
        with self._verl_config():
            self._verl_weights.load(bucket)

    def verl_parts(self, names: list[str]) -> dict[str, list[WeightPart]] | None:
        """See :meth:`ModelWeights.parts`."""
        with self._verl_config():
            return self._verl_weights.parts(names)

    def verl_end_update(self) -> None:
        """See :meth:`ModelWeights.end`."""
        with self._verl_config():
            self._verl_weights.end()

    def verl_cancel_update(self) -> None:
        """See :meth:`ModelWeights.cancel`."""
        with self._verl_config():
            self._verl_weights.cancel()

    def verl_begin_adapter(self) -> None:
        """See :meth:`AdapterSlots.begin`."""
        assert self._verl_slots is not None
        self._verl_slots.begin()

    def verl_load_adapter(self, bucket: Iterable[Named]) -> None:
        """See :meth:`AdapterSlots.load`."""
        assert self._verl_slots is not None
        self._verl_slots.load(bucket)

    def verl_digests(self, source: Mapping[str, torch.Tensor] | None) -> dict[str, str]:
        """Digest per weight and adapter matrix; see :meth:`ModelWeights.digests`, :meth:`AdapterSlots.digests`."""
        slots = self._verl_slots
        base, adapter = (None, None) if source is None else split_adapter(source.items())
        with self._verl_config():
            found = self._verl_weights.digests(None if base is None else dict(base))
        if slots is not None:
            found |= slots.digests(None if adapter is None else dict(adapter))
        return found

    def verl_release_weights(self) -> bool:
        """Give the memory of weights and adapter back; see :meth:`ModelWeights.release`."""
        released = self._verl_weights.release()
        if released and self._verl_slots is not None:
            self._verl_slots.release()
        return released

    def verl_release_cache(self) -> bool:
        """Give the memory of the key-value cache back (CPU); whether that was possible."""
        freed = [forget_pages(storage) for storage in self._verl_cache_storages()]
        self._verl_cache_held = not all(freed)
        return not self._verl_cache_held

    def verl_restore_cache(self) -> None:
        """The cache may be used again (CPU); its memory is taken as it fills."""
        self._verl_cache_held = True

    def verl_memory(self) -> tuple[int, int | None]:
        """Bytes of the key-value cache and of weights and adapter (None: unknown)."""
        cache = sum(storage.nbytes() for storage in self._verl_cache_storages()) if self._verl_cache_held else 0
        weights = self._verl_weights.nbytes()
        if weights is not None and self._verl_slots is not None:
            weights += self._verl_slots.nbytes()
        return cache, weights

    def _verl_cache_storages(self) -> list[torch.UntypedStorage]:
        tensors: list[torch.Tensor] = []
        for cache in self.model_runner.kv_caches:
            tensors += cache if isinstance(cache, list | tuple) else [cache]
        return list({t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}.values())

    @contextlib.contextmanager
    def _verl_config(self) -> Iterator[None]:
        """What vLLM's loaders need: its settings, and the model's own layers under their names."""
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.vllm_config), base_layers(self._verl_weights.model):
            yield


def stream_seed(seed: int, position: int) -> int:
    """Seed of the random numbers that draw the token at a position of a sequence; below 2**63.

    torch's generator on CPUs looks at the lower half of its seed only: both numbers must reach all bits.
    """
    mixed = hashlib.blake2b(seed.to_bytes(16, "little", signed=True) + position.to_bytes(8, "little"), digest_size=8)
    return int.from_bytes(mixed.digest(), "little") >> 1
