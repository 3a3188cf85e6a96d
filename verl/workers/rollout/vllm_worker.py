"""What is added to vLLM's worker: new weights, and on CPUs the release of memory, which vLLM does not have there."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from verl.utils.pages import forget_pages
from verl.workers.rollout.base import WeightPart
from verl.workers.rollout.manifest import Named, WeightManifest
from verl.workers.rollout.vllm_weights import ModelWeights

#: what vLLM imports
EXTENSION = "verl.workers.rollout.vllm_worker.WorkerExtension"


class WorkerExtension:
    """Mixed into vLLM's worker class; ``collective_rpc`` calls its methods on every rank."""

    model_runner: Any
    vllm_config: Any
    use_v2_model_runner: bool

    def verl_attach(self, manifest: WeightManifest, dtype: torch.dtype, pack: bool) -> bool:
        """Take charge of the weights of the model that was loaded; whether they are updated in place."""
        self._verl_weights = ModelWeights(
            self.model_runner.get_model(), self.vllm_config.model_config, manifest=manifest, dtype=dtype, pack=pack
        )
        self._verl_cache_held = True
        if not self.use_v2_model_runner:  # the other one draws by seed and position itself
            self.model_runner.sampler.register_forward_pre_hook(self._verl_place_random_streams)
        return self._verl_weights.in_place

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

    def verl_digests(self, source: Mapping[str, torch.Tensor] | None) -> dict[str, str]:
        """See :meth:`ModelWeights.digests`."""
        return self._verl_weights.digests(source)

    def verl_release_weights(self) -> bool:
        """See :meth:`ModelWeights.release`."""
        return self._verl_weights.release()

    def verl_release_cache(self) -> bool:
        """Give the memory of the key-value cache back (CPU); whether that was possible."""
        freed = [forget_pages(storage) for storage in self._verl_cache_storages()]
        self._verl_cache_held = not all(freed)
        return not self._verl_cache_held

    def verl_restore_cache(self) -> None:
        """The cache may be used again (CPU); its memory is taken as it fills."""
        self._verl_cache_held = True

    def verl_memory(self) -> tuple[int, int | None]:
        """Bytes of the key-value cache and of the weights (None: unknown)."""
        cache = sum(storage.nbytes() for storage in self._verl_cache_storages()) if self._verl_cache_held else 0
        return cache, self._verl_weights.nbytes()

    def _verl_cache_storages(self) -> list[torch.UntypedStorage]:
        tensors: list[torch.Tensor] = []
        for cache in self.model_runner.kv_caches:
            tensors += cache if isinstance(cache, list | tuple) else [cache]
        return list({t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}.values())

    def _verl_config(self) -> Any:
        from vllm.config import set_current_vllm_config

        return set_current_vllm_config(self.vllm_config)


def stream_seed(seed: int, position: int) -> int:
    """Seed of the random numbers that draw the token at a position of a sequence; below 2**63.

    torch's generator on CPUs looks at the lower half of its seed only: both numbers must reach all bits.
    """
    mixed = hashlib.blake2b(seed.to_bytes(16, "little", signed=True) + position.to_bytes(8, "little"), digest_size=8)
    return int.from_bytes(mixed.digest(), "little") >> 1
