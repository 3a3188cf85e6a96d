"""Checks of low-rank adapters: apart and added to the weights, switched off, and in files of the PEFT format."""

from __future__ import annotations

import json
from collections.abc import Iterator

from safetensors.torch import load_file

from verl.models.lora import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from verl.selftest.certificate.bench import Bench
from verl.selftest.certificate.engines import POLICY, Generator
from verl.selftest.certificate.generation import log_prob_measure
from verl.selftest.certificate.outcome import TEMPERATURE, TRANSFORMERS, Measure
from verl.workers.engine.base import MicroBatching
from verl.workers.engine.checkpoint import ADAPTER_DIR

ADAPTERS, FILES = "adapters", "adapter files"
_PEFT_PREFIX, _PEFT_SUFFIX = "base_model.model.", ".weight"


def adapters(bench: Bench) -> Iterator[Measure]:
    """Adapters apart and added to the weights are one policy, and without them the model is its base."""
    if not bench.setup.lora:
        yield Measure(ADAPTERS, "", reason="not asked for (--lora)")
        return
    base = bench.load_plain(bench.subject.path)
    want = base.forward(bench.rows.batch, TEMPERATURE)
    off = bench.trainer.engine.forward(
        bench.rows.batch, POLICY, micro=MicroBatching(), temperature=TEMPERATURE, adapter=False
    )
    got = {name: value.cpu() for name, value in off.items()}
    yield from bench.compare_outputs(ADAPTERS, "switched off", got, want, against=f"{TRANSFORMERS}, base model")
    held_apart = bench.generator.engine.supports_lora_update
    other = Generator(bench.subject, bench.setup, bench.rows.longest_prompt, merged=bool(held_apart))
    other.sync(bench.trainer)
    prompts = bench.rows.prompts
    done = other.generate(prompts, seed=bench.seed + 60, temperature=TEMPERATURE, ignore_eos=True)
    expected = [
        bench.plain.token_log_probs(prompt, item.token_ids, TEMPERATURE)
        for prompt, item in zip(prompts, done, strict=True)
    ]
    case = "rollout, added to the weights" if held_apart else "rollout"
    yield log_prob_measure(bench, ADAPTERS, case, prompts, done, expected, f"{TRANSFORMERS}, W + s B A")


def adapter_files(bench: Bench) -> Iterator[Measure]:
    """The adapter's files, read as PEFT reads them and added to the base model, give the trainer's numbers."""
    check = FILES
    if not bench.setup.lora:
        yield Measure(check, "", reason="not asked for (--lora)")
        return
    want = bench.updated.forward(bench.rows.batch, MicroBatching(), TEMPERATURE)
    directory = bench.checkpoint / ADAPTER_DIR
    config = json.loads((directory / ADAPTER_CONFIG).read_text("utf-8"))
    stored = load_file(directory / ADAPTER_WEIGHTS)
    matrices = {name.removeprefix(_PEFT_PREFIX).removesuffix(_PEFT_SUFFIX): value for name, value in stored.items()}
    plain = bench.load_plain(bench.subject.path)
    plain.add_adapters(matrices, float(config["lora_alpha"]) / int(config["r"]))
    got = plain.forward(bench.rows.batch, TEMPERATURE)
    yield from bench.compare_outputs(check, "base model with the adapter", got, want, against="trainer")
