"""What must hold for a model family to be called supported: one function per claim, each of which fails if it is false.

The table of families in the documentation is made from the names here (``tools/gen_families_reference.py``);
``test_families.py`` runs every cell of it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from tests.models.families import make_batch
from tests.models.images import Inputs, example_rows, image_batch
from tests.workers.engine.reference import POLICY, TEMPERATURE, make_engine, policy_loss, run_reference
from tests.workers.rollout.helpers import generate, hf_rollout, make_model, random_prompts, reference_greedy
from verl.models.loading import language_model_class
from verl.models.vision import ImageTokens
from verl.workers.engine.base import MicroBatching
from verl.workers.rollout.types import SamplingParams
from verl.workers.sharding_manager.sync import WeightSync

WHOLE = MicroBatching()
PROMPTS = (3, 17, 9, 1, 12)


def save_model(family: str, directory: Path) -> str:
    """A random model of the family on disk, its predictions not uniform."""
    make_model(family, spread=3.0).save_pretrained(directory)
    return str(directory)


def reads_images(path: str) -> bool:
    """Whether a model directory holds a vision-language model."""
    return ImageTokens.of(AutoConfig.from_pretrained(path)) is not None


def batch(path: str) -> TensorDict:
    """Ragged rows, some with equal prompts, a hole in one response; with images where the model reads them."""
    if reads_images(path):
        return image_batch()[0]
    rows = make_batch([5, 5, 9, 9, 3, 3], [3, 7, 1, 6, 2, 9], equal_prompts_of=2)
    rows["response_mask"][5, 2:4] = 0
    generator = torch.Generator().manual_seed(3)
    rows["advantages"] = torch.randn(rows["response_mask"].shape, generator=generator)
    return TensorDict(rows, batch_size=[6])


def reference(path: str, model_path: str, steps: int) -> dict[str, Any]:
    """Numbers of plain Transformers for the rows that are meant for ``path``."""
    images = image_batch()[1] if reads_images(path) else None
    return run_reference(model_path, dict(batch(path).items()), steps=steps, images=images)


def prompts(path: str) -> tuple[list[list[int]], list[Inputs | None]]:
    """Prompts to answer, and their images."""
    if reads_images(path):
        return example_rows()
    drawn = random_prompts(PROMPTS)
    return drawn, [None] * len(drawn)


def transformers_model(path: str) -> PreTrainedModel:
    """The model in plain Transformers."""
    model_class = language_model_class(AutoConfig.from_pretrained(path))
    return model_class.from_pretrained(path, attn_implementation="eager").eval()


def step(path: str, **settings: Any) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Outputs before, and numbers of, one update."""
    engine = make_engine(path, **settings)
    out = engine.forward(batch(path), POLICY, micro=MicroBatching(size=4), temperature=TEMPERATURE)
    metrics = engine.train_batch(
        batch(path), policy_loss, want=POLICY, micro=MicroBatching(size=4), temperature=TEMPERATURE
    )
    return out, metrics.values_by_name()


def close(got: dict[str, float], want: dict[str, float]) -> None:
    """Loss and gradient norm agree to float32 rounding."""
    for name in ("loss", "grad_norm"):
        torch.testing.assert_close(got[name], want[name], rtol=2e-5, atol=2e-6)


def trains_as_transformers(path: str, directory: Path) -> None:
    """Log-probabilities, entropy, loss and gradient norm are those of plain Transformers, one row at a time."""
    want = reference(path, path, steps=1)
    out, numbers = step(path)
    for name in POLICY:
        torch.testing.assert_close(out[name], want[name], rtol=1e-5, atol=1e-5)
    close(numbers, {"loss": want["loss"][0], "grad_norm": want["grad_norm"][0]})


def packs(path: str, directory: Path) -> None:
    """Rows without padding give the numbers of padded rows."""
    (packed, packed_numbers), (padded, padded_numbers) = step(path, packed=True), step(path, packed=False)
    for name in POLICY:
        torch.testing.assert_close(packed[name], padded[name], rtol=1e-5, atol=1e-5)
    close(packed_numbers, padded_numbers)


def checkpoints_gradients(path: str, directory: Path) -> None:
    """Recomputed activations give the same gradients."""
    close(step(path, checkpointing=True)[1], step(path)[1])


def generates(path: str, directory: Path) -> None:
    """The built-in engine's greedy tokens are those of Transformers' ``generate``."""
    _same_greedy(path, hf_rollout(path), transformers_model(path), sync_from=make_engine(path))


def generates_after_an_update(path: str, directory: Path) -> None:
    """After an optimizer step, the weight sync makes generation use the new weights."""
    engine = make_engine(path, optim={"lr": 0.1})  # large enough that greedy tokens change in every family
    rollout = hf_rollout(path)
    WeightSync(engine, rollout).sync(1)
    before = _greedy(path, rollout)
    engine.train_batch(batch(path), policy_loss, want=POLICY, micro=WHOLE)
    model = transformers_model(path)
    missing = model.load_state_dict(dict(engine.named_tensors()), strict=False)
    assert not missing.unexpected_keys
    _same_greedy(path, rollout, model, sync_from=engine, version=2)
    assert _greedy(path, rollout) != before, "the step was too small to show"


def saves_for_transformers(path: str, directory: Path) -> None:
    """What the engine writes as a Hugging Face model loads in Transformers with the same numbers."""
    engine = make_engine(path)
    engine.train_batch(batch(path), policy_loss, want=POLICY, micro=WHOLE)
    engine.save(directory / "saved", frozenset({"hf_model"}))
    (exported,) = {config.parent for config in (directory / "saved").rglob("config.json")}
    want = engine.forward(batch(path), POLICY, micro=WHOLE, temperature=TEMPERATURE)
    got = reference(path, str(exported), steps=0)
    for name in POLICY:
        torch.testing.assert_close(want[name], got[name], rtol=1e-5, atol=1e-5)


#: column of the table -> check(model directory, directory for its files)
CHECKS: dict[str, Callable[[str, Path], None]] = {
    "training = Transformers": trains_as_transformers,
    "packed = padded": packs,
    "gradient checkpointing": checkpoints_gradients,
    "generation (hf)": generates,
    "weights after a step": generates_after_an_update,
    "saved model loads": saves_for_transformers,
}

#: (family, column) -> what is said instead of "yes"; the check must then fail with this sentence
UNSUPPORTED: dict[tuple[str, str], str] = dict.fromkeys(
    (("lfm2", "generation (hf)"), ("lfm2", "weights after a step")),
    "has conv layers, which rollout.name=hf does not serve",
)


def _greedy(path: str, rollout: Any) -> list[list[int]]:
    asked, images = prompts(path)
    out = generate(rollout, asked, SamplingParams(8, temperature=0.0), images)
    return [completion.token_ids for completion in out]


def _same_greedy(path: str, rollout: Any, model: torch.nn.Module, *, sync_from: Any, version: int = 1) -> None:
    WeightSync(sync_from, rollout).sync(version)
    asked, images = prompts(path)
    want = [reference_greedy(model, prompt, 8, shown) for prompt, shown in zip(asked, images, strict=True)]
    assert _greedy(path, rollout) == want
