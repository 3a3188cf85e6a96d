"""Checks of weights on their way: to the rollout engine after an update, into a checkpoint, out of the merger."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from verl.selftest.certificate.bench import Bench
from verl.selftest.certificate.engines import Trainer
from verl.selftest.certificate.generation import log_prob_measure, rollout_batch
from verl.selftest.certificate.outcome import TEMPERATURE, Measure
from verl.selftest.certificate.plain import PlainModel
from verl.selftest.compare import Deviation
from verl.workers.engine.base import MicroBatching
from verl.workers.rollout.engine import run_blocking

SYNC, SAVED, TIED = "weight sync", "save and merge", "tied weights"
#: log-probs must change by this much, or an update shows nothing
_VISIBLE = 100


def weight_sync(bench: Bench) -> Iterator[Measure]:
    """After an update and a sync the rollout engine samples from the new weights, and nothing of the old is left."""
    prompts = bench.rows.prompts
    bench.generator.generate(prompts, seed=bench.seed + 50, temperature=TEMPERATURE)  # caches of the old weights
    updated = bench.updated
    bench.generator.sync(updated)
    done = bench.generator.generate(prompts, seed=bench.seed + 50, temperature=TEMPERATURE, ignore_eos=True)
    fresh = bench.saved_plain
    want = [
        fresh.token_log_probs(prompt, item.token_ids, TEMPERATURE) for prompt, item in zip(prompts, done, strict=True)
    ]
    against = "Transformers' load of the saved model"
    yield log_prob_measure(bench, SYNC, "after an update, rollout", prompts, done, want, against)
    batch = rollout_batch(bench, prompts, done)
    got = updated.forward(batch, MicroBatching(), TEMPERATURE)
    yield from bench.compare_outputs(
        SYNC,
        "after an update, trainer",
        {"log_probs": got["log_probs"]},
        {"log_probs": batch["rollout_log_probs"]},
        against=f"rollout ({bench.setup.rollout})",
        mask=batch["response_mask"],
    )
    yield _visible(bench, fresh)
    if not bench.generator.engine.supports_lora_update:
        yield _served(bench, updated)


def _visible(bench: Bench, fresh: PlainModel) -> Measure:
    """The update was large enough to show a weight that is stale."""
    before, after = bench.reference["log_probs"], fresh.forward(bench.rows.batch, TEMPERATURE)["log_probs"]
    change = float((after - before).abs().max())
    needed = _VISIBLE * bench.tolerances.log_probs
    small = 0 if change > needed else 1
    where = f"log-probs changed by up to {change:.3g}"
    return bench.exact(SYNC, "update", "updates too small to show", small, where, "the model before")


def _served(bench: Bench, trainer: Trainer) -> Measure:
    """Weights that the rollout engine holds otherwise than the trainer has them."""
    engine = bench.generator.engine

    async def digests() -> tuple[dict[str, str], dict[str, str]]:
        expected: dict[str, str] = {}
        for name, tensor in trainer.engine.named_tensors():
            for key, digest in (await engine.checksums({name: tensor})).items():
                expected.setdefault(key, digest)
        return expected, await engine.checksums()

    expected, held = run_blocking(digests())
    wrong = sorted(name for name in expected.keys() | held.keys() if expected.get(name) != held.get(name))
    where = wrong[0] if wrong else f"{len(held)} weights"
    return bench.exact(SYNC, "weights", "weights with another digest", len(wrong), where, "trainer")


def save_and_merge(bench: Bench) -> Iterator[Measure]:
    """A checkpoint, merged by ``verl.model_merger``, loads in Transformers with the trainer's numbers."""
    updated = bench.updated
    want = updated.forward(bench.rows.batch, MicroBatching(), TEMPERATURE)
    for case, directory in (("merged", bench.merged), ("saved for Transformers", bench.checkpoint / "huggingface")):
        plain = bench.saved_plain if directory != bench.merged else bench.load_plain(directory)
        lost = plain.not_loaded
        where = lost[0] if lost else ""
        yield bench.exact(SAVED, case, "tensors that are missing or too many", len(lost), where, "the architecture")
        got = plain.forward(bench.rows.batch, TEMPERATURE)
        yield from bench.compare_outputs(SAVED, case, got, want, against="trainer")
        yield _tensors(bench, case, plain, updated)


def _tensors(bench: Bench, case: str, plain: PlainModel, trainer: Trainer) -> Measure:
    """Tensors of a loaded directory that differ from the trainer's."""
    loaded = dict(plain.model.state_dict())
    wrong: list[str] = []
    count = 0
    for name, tensor in trainer.engine.named_tensors():
        count += 1
        found = loaded.get(name)
        if found is None or found.shape != tensor.shape or not torch.equal(found.cpu(), tensor.detach().cpu()):
            wrong.append(name)
    where = wrong[0] if wrong else f"{count} tensors"
    return bench.exact(SAVED, case, "tensors with other values", len(wrong), where, "trainer")


def tied(bench: Bench) -> Iterator[Measure]:
    """Tied embeddings stay one tensor: in the trainer, in the rollout engine and in what is saved."""
    check = TIED
    plain = bench.plain.model
    head, embedding = plain.get_output_embeddings(), plain.get_input_embeddings()
    if head is None or head.weight is not embedding.weight:
        yield Measure(check, "", reason="input and output embedding are two weights")
        return
    names = [name for name, _ in bench.updated.engine.named_tensors()]
    output = next(name for name, module in plain.named_modules() if module is head)
    many = [name for name in names if name == f"{output}.weight"] if bench.embedding_name in names else []
    yield bench.exact(check, "trainer", "second copies that are exported", len(many), ", ".join(many))
    saved = bench.saved_plain.model
    apart = int(saved.get_output_embeddings().weight is not saved.get_input_embeddings().weight)
    yield bench.exact(check, "saved for Transformers", "models that load untied", apart)
    module = getattr(bench.generator.engine, "module", None) if bench.generates else None
    if module is None:
        return
    one, other = module.get_output_embeddings().weight, module.get_input_embeddings().weight
    difference = 0.0 if one is other else float((one.double() - other.double()).abs().max())
    yield Measure(
        check,
        f"rollout ({bench.setup.rollout})",
        "its input embedding",
        Deviation("output embedding", difference, bench.tolerances.exact),
    )
