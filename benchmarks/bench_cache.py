"""What it gains to fill a small key-value cache by what answers are expected to need, on one CPU thread.

The built-in engine generates the same samples three times: in a cache of the given size, with samples admitted by what
they are expected to need and preempted when that was wrong; in the same cache, with room for the longest answer of
every sample, so that none is ever preempted; and in a cache with room for all. CPU seconds are compared, the best of
several alternating repeats. The last line is JSON: ``ratio`` is need / longest and ``of_roomy`` need / roomy, in
tokens per CPU-second.

    python benchmarks/bench_cache.py [--case medium_long_ragged] [--cache-tokens 5632 2816] [--repeats 3]
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Callable, Sequence

import numpy as np
import torch
from bench_rollout import CASES, Case, build, cpu_seconds, make_rows, run_engine

from verl.workers.rollout.hf.engine import HFRolloutEngine
from verl.workers.rollout.hf.kv_budget import CacheBudget, Progress


def longest(running: Sequence[Progress]) -> np.ndarray:
    """Survival of answers that all reach their limit: what is expected is the most that there may be."""
    return np.ones_like(CacheBudget().survival(running))


def bench(case: Case, repeats: int, tokens: int) -> dict[str, float]:
    """Run one case in a cache of ``tokens``, and in one with room for all."""
    engine, rows = build(case, ["hf"])[1]["hf"], make_rows(case)
    assert isinstance(engine, HFRolloutEngine)
    need, room = engine.cache_budget.survival, engine._cached_tokens_limit
    ways: dict[str, tuple[Callable[[], int], Callable[[Sequence[Progress]], np.ndarray]]] = {
        "roomy": (room, need),
        "longest": (lambda: tokens, longest),
        "need": (lambda: tokens, need),
    }
    best = dict.fromkeys(ways, (float("inf"), 0))
    found: dict[str, float] = {}
    run_engine(engine, case, rows)
    for _ in range(repeats):
        for name, (limit, survival) in ways.items():
            asyncio.run(engine.sleep())  # gives the cache back
            asyncio.run(engine.wake())
            engine._cached_tokens_limit = limit  # type: ignore[method-assign]
            engine.cache_budget.survival = survival  # type: ignore[method-assign]
            before = engine.counters()
            best[name] = min(best[name], cpu_seconds(lambda: run_engine(engine, case, rows)))
            found |= {f"{name}_{key}": value - before[key] for key, value in engine.counters().items()}
            found[f"{name}_kv_mib"] = engine.memory().kv_cache / 2**20
    rates = {name: count / seconds for name, (seconds, count) in best.items()}
    found |= {f"{name}_tokens_per_cpu_s": rate for name, rate in rates.items()}
    found |= {"ratio": rates["need"] / rates["longest"], "of_roomy": rates["need"] / rates["roomy"]}
    return {key: round(value, 3) for key, value in found.items()}


def main() -> None:
    """Parse the command line, run, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--case", choices=sorted(CASES), default="medium_long_ragged")
    parser.add_argument("--cache-tokens", type=int, nargs="+", default=[5632, 2816])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = {str(n): bench(CASES[arguments.case], arguments.repeats, n) for n in arguments.cache_tokens}
    for tokens, result in results.items():
        print(f"{tokens} tokens: need / longest {result['ratio']:.2f}, need / roomy {result['of_roomy']:.2f}  {result}")
    print(json.dumps({"benchmark": "cache", "case": arguments.case, **results}))


if __name__ == "__main__":
    main()
