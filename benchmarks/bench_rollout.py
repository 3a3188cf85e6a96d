"""How much faster the rollout engines are than Transformers' ``generate``, on one CPU thread.

All sample the same number of tokens from the same random model in the same process; CPU seconds are compared, the
best of several alternating repeats. The last line is JSON: the ratios are ``generate`` / engine. vLLM and SGLang need
their own environments (``make install-vllm``, ``make install-sglang``) and heads of a size that they serve.

    python benchmarks/bench_rollout.py [--repeats 5] [--case small] [--plot rollout.png]
    .venv-vllm/bin/python benchmarks/bench_rollout.py --engine hf --engine vllm --case medium
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from plots import saved_figure
from transformers import AutoModelForCausalLM, Qwen2Config

from verl.config import ModelConfig, RolloutConfig
from verl.workers.rollout import get_rollout_class
from verl.workers.rollout.engine import RolloutEngine
from verl.workers.rollout.types import GenerationRequest, SamplingParams


@dataclass(frozen=True)
class Case:
    """One workload.

    Attributes:
        hidden, intermediate, layers, heads, kv_heads: shape of the Qwen2 model.
        prompts: number of prompts; ``samples`` completions each.
        prompt_lengths: shortest and longest prompt.
        new_tokens: tokens per completion.
        stop: let completions end at the end-of-sequence token.
        dtype: of both sides.
        tied: use the input embedding for the output. Without, the next token is nearly even: completions end after 104
            tokens on average, the size of the vocabulary, where they may.
    """

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    prompts: int
    samples: int
    prompt_lengths: tuple[int, int]
    new_tokens: int
    stop: bool = False
    dtype: str = "float32"
    tied: bool = True


CASES = {
    "small": Case(96, 288, 3, 4, 2, 64, 8, (34, 34), 12),
    "small_heads32": Case(96, 288, 3, 3, 1, 64, 8, (34, 34), 12),
    "small_stop": Case(96, 288, 3, 4, 2, 64, 8, (34, 34), 12, stop=True),
    "small_ragged": Case(96, 288, 3, 4, 2, 64, 8, (16, 48), 12, stop=True),
    "medium": Case(320, 1088, 6, 10, 2, 16, 8, (48, 48), 32),
    "medium_ragged": Case(320, 1088, 6, 10, 2, 16, 8, (24, 96), 32, stop=True),
    "medium_long": Case(320, 1088, 6, 10, 2, 16, 8, (48, 48), 200),
    "medium_long_ragged": Case(320, 1120, 6, 10, 2, 16, 8, (24, 96), 256, stop=True, tied=False),
    "medium_bf16": Case(320, 1088, 6, 10, 2, 16, 8, (48, 48), 32, dtype="bfloat16"),
}
VOCABULARY, EOS, PAD = 104, 1, 0


def cpu_seconds(run: Callable[[], int]) -> tuple[float, int]:
    """CPU time of ``run`` and what it returns, the number of tokens."""
    start = time.process_time()
    tokens = run()
    return time.process_time() - start, tokens


def build(case: Case, names: Sequence[str]) -> tuple[Any, dict[str, RolloutEngine]]:
    """A random model and the engines called ``names`` with its weights."""
    torch.manual_seed(0)
    config = Qwen2Config(
        hidden_size=case.hidden,
        intermediate_size=case.intermediate,
        num_hidden_layers=case.layers,
        num_attention_heads=case.heads,
        num_key_value_heads=case.kv_heads,
        vocab_size=VOCABULARY,
        tie_word_embeddings=case.tied,
        eos_token_id=EOS,
        pad_token_id=PAD,
        bos_token_id=None,
    )
    dtype = getattr(torch, case.dtype)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()
    engines: dict[str, RolloutEngine] = {}
    with tempfile.TemporaryDirectory() as directory:
        config.save_pretrained(directory)
        for name in names:
            rollout = RolloutConfig(
                name=name,
                dtype=case.dtype,
                prompt_length=case.prompt_lengths[1],
                response_length=case.new_tokens,
                max_num_seqs=case.prompts * case.samples,
            )
            engines[name] = get_rollout_class(name)(ModelConfig(path=directory), rollout, device="cpu")

    async def load(engine: RolloutEngine) -> None:
        await engine.begin_update(1)
        await engine.load(model.named_parameters())
        await engine.end_update()

    for engine in engines.values():
        asyncio.run(load(engine))
    return model, engines


def make_rows(case: Case) -> list[list[int]]:
    """Random prompts, each as often as it is sampled."""
    generator = torch.Generator().manual_seed(1)
    low, high = case.prompt_lengths
    lengths = torch.randint(low, high + 1, (case.prompts,), generator=generator).tolist()
    prompts = [torch.randint(2, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]
    return [prompt for prompt in prompts for _ in range(case.samples)]


def run_engine(engine: RolloutEngine, case: Case, rows: Sequence[list[int]]) -> int:
    """Generate for all rows; returns the number of tokens."""
    requests = [
        GenerationRequest(row, SamplingParams(case.new_tokens, seed=i, ignore_eos=not case.stop), str(i))
        for i, row in enumerate(rows)
    ]
    return sum(len(item.token_ids) for item in asyncio.run(engine.generate_many(requests)))


def bench(case: Case, repeats: int, names: Sequence[str]) -> dict[str, float]:
    """Run one case with the engines called ``names``."""
    model, engines = build(case, names)
    rows = make_rows(case)
    width = max(map(len, rows))
    input_ids = torch.tensor([[PAD] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])

    def run_generate() -> int:
        out = model.generate(
            input_ids,
            attention_mask=mask,
            do_sample=True,
            top_k=0,
            max_new_tokens=case.new_tokens,
            min_new_tokens=None if case.stop else case.new_tokens,
        )[:, width:]
        ended = (out == EOS).cumsum(1).sub((out == EOS).long())
        return int((ended == 0).sum()) if case.stop else out.numel()

    best_generate = (float("inf"), 0)
    best = dict.fromkeys(engines, (float("inf"), 0))
    run_generate()
    for engine in engines.values():
        run_engine(engine, case, rows)
    for _ in range(repeats):
        for name, engine in engines.items():
            best[name] = min(best[name], cpu_seconds(lambda engine=engine: run_engine(engine, case, rows)))
        best_generate = min(best_generate, cpu_seconds(run_generate))
    generate_rate = best_generate[1] / best_generate[0]
    result = {"generate_cpu_s": best_generate[0], "generate_tokens_per_cpu_s": generate_rate}
    for name, (seconds, tokens) in best.items():
        prefix = "" if name == "hf" else f"{name}_"
        result[f"{prefix or 'engine_'}cpu_s"] = seconds
        result[f"{prefix or 'engine_'}tokens_per_cpu_s"] = tokens / seconds
        result[f"{prefix}ratio"] = tokens / seconds / generate_rate
    return {key: round(value, 4) for key, value in result.items()}


def draw(results: dict[str, dict[str, float]], path: Path) -> None:
    """How many times as fast as ``generate`` every engine is, case by case."""
    names = [key for key in next(iter(results.values())) if key.endswith("ratio")]
    with saved_figure(path, size=(6.0, 1.0 + 0.4 * len(results) * len(names))) as (axis,):
        for number, name in enumerate(names):
            rows = [row + 0.8 * number / len(names) for row in range(len(results))]
            label = name.removesuffix("_ratio") if name != "ratio" else "hf"
            axis.barh(rows, [result[name] for result in results.values()], height=0.8 / len(names), label=label)
        axis.axvline(1.0, color="black", linewidth=0.8)
        axis.set_yticks(range(len(results)), list(results))
        axis.invert_yaxis()
        axis.set_xlabel("tokens per CPU-second, as multiple of Transformers' generate")
        axis.legend(fontsize=7)


def main() -> None:
    """Parse the command line, run, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--case", action="append", choices=sorted(CASES))
    parser.add_argument("--engine", action="append", choices=("hf", "vllm", "sglang"))
    parser.add_argument("--plot", type=Path, help="write a bar chart")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    engines = arguments.engine or ["hf"]
    results = {name: bench(CASES[name], arguments.repeats, engines) for name in arguments.case or CASES}
    for name, result in results.items():
        ratios = "  ".join(f"{key} {value:.2f}x" for key, value in result.items() if key.endswith("ratio"))
        print(f"{name:14s} {ratios}  {result}")
    if arguments.plot:
        draw(results, arguments.plot)
    print(json.dumps({"benchmark": "rollout", **results}))


if __name__ == "__main__":
    main()
