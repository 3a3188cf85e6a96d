"""What the training engine saves, as ratios measured in one run on one CPU thread.

    python benchmarks/bench_engine.py [--repeats 5] [--hidden 96] [--layers 3] [--prompts 64] [--samples 8]

The workload is a GRPO step: prompts x samples with ragged lengths, four mini-batches. CPU seconds are the best of
several alternating repeats. The last line is JSON; every ratio is "other / engine", so larger is better:

- ``update_vs_plain``, ``log_probs_vs_plain``: a bare loop over Transformers' model with padded rows, response logits
  only, torch's AdamW and clipping;
- ``update_padded``, ``update_packed``: the engine itself with padded rows, and packed rows that do not share prompts;
- ``log_prob_memory_naive``: extra peak memory of log-probs and their gradient through full logits, against chunks;
- ``fully_shard_cost``: CPU time of an update on one rank with ``fully_shard`` around the model, against the plain
  module that the engine uses there.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from tensordict import TensorDict
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from verl.config import FSDPConfig, ModelConfig, OptimConfig
from verl.models.logprobs import token_log_probs
from verl.utils.metrics import MetricSet, msum
from verl.workers.engine.base import GlobalBatchInfo, MicroBatching
from verl.workers.engine.fsdp.engine import FSDPEngine
from verl.workers.engine.fsdp.sharding import make_mesh, shard_model

LOG_PROBS = frozenset({"log_probs"})
MINI_BATCHES = 4
LR = 1e-4


def make_batch(prompts: int, samples: int, prompt: tuple[int, int], response: tuple[int, int]) -> dict[str, Tensor]:
    """Ragged rows, ``samples`` for each prompt."""
    rng = random.Random(0)
    rows = prompts * samples
    width_p, width_r = prompt[1], response[1]
    ids = torch.zeros((rows, width_p + width_r), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for first in range(0, rows, samples):
        p = rng.randint(*prompt)
        text = torch.randint(3, 104, (p,))
        for row in range(first, first + samples):
            r = rng.randint(*response)
            ids[row, width_p - p : width_p] = text
            ids[row, width_p : width_p + r] = torch.randint(3, 104, (r,))
            mask[row, width_p - p : width_p + r] = 1
    return {
        "input_ids": ids,
        "responses": ids[:, width_p:].clone(),
        "attention_mask": mask,
        "position_ids": (mask.cumsum(-1) - 1).clamp(min=0),
        "response_mask": mask[:, width_p:].clone(),
        "advantages": torch.randn(rows, width_r),
    }


def clipped_sum(log_probs: Tensor, rows: Mapping[str, Tensor]) -> Tensor:
    """Sum of the clipped policy loss over response tokens, on-policy."""
    ratio = torch.exp(log_probs - log_probs.detach())
    terms = -torch.minimum(ratio * rows["advantages"], ratio.clamp(0.8, 1.2) * rows["advantages"])
    return torch.where(rows["response_mask"].bool(), terms, torch.zeros(())).sum()


def loss(outputs: Mapping[str, Tensor], rows: TensorDict, info: GlobalBatchInfo) -> tuple[Tensor, MetricSet]:
    """As an engine calls it."""
    value = clipped_sum(outputs["log_probs"], rows) / info.batch_num_tokens * info.dp_size
    return value, MetricSet({"loss": msum(float(value.detach()))})


class Plain:
    """The bare loop."""

    def __init__(self, path: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="sdpa")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR)

    def log_probs(self, rows: Mapping[str, Tensor]) -> Tensor:
        logits = self.model(
            input_ids=rows["input_ids"],
            attention_mask=rows["attention_mask"],
            position_ids=rows["position_ids"],
            logits_to_keep=rows["responses"].shape[1] + 1,
            use_cache=False,
        ).logits[:, :-1]
        return torch.log_softmax(logits, -1).gather(2, rows["responses"][..., None])[..., 0]

    def update(self, minis: list[dict[str, Tensor]]) -> None:
        for rows in minis:
            self.optimizer.zero_grad()
            (clipped_sum(self.log_probs(rows), rows) / rows["response_mask"].sum()).backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()

    @torch.no_grad()
    def evaluate(self, minis: list[dict[str, Tensor]]) -> None:
        for rows in minis:
            self.log_probs(rows)


class ShardedEngine(FSDPEngine):
    """The engine with ``fully_shard`` even where it would do without."""

    def build(self) -> None:
        super().build()
        from verl.utils.distributed import init_process_group
        from verl.workers.engine.fsdp.engine import _make_optimizer

        init_process_group("cpu")
        mesh = make_mesh(self.device, -1)
        self._fsdp = shard_model(self.module, mesh, self.fsdp_config, self.precision, self.device)
        assert self.optim_config is not None
        self._parameters = list(self.module.parameters())
        self.optimizer = _make_optimizer(self.optim_config, self._parameters)


def make_engine(
    path: str, kind: type[FSDPEngine] = FSDPEngine, *, packed: bool = True, share: bool = True
) -> FSDPEngine:
    """An engine on CPU in float32 without gradient checkpointing."""
    model = ModelConfig(path=path, enable_gradient_checkpointing=False, use_remove_padding=packed)
    engine = kind(model, FSDPConfig(), OptimConfig(lr=LR), device="cpu")
    engine.build()
    engine.share_prompts = share
    return engine


def best_of(repeats: int, work: dict[str, Callable[[], None]]) -> dict[str, float]:
    """Least CPU seconds of each piece of work, taken in turn so that all see the same machine."""
    best = dict.fromkeys(work, float("inf"))
    for function in work.values():
        function()
    for _ in range(repeats):
        for name, function in work.items():
            start = time.process_time()
            function()
            best[name] = min(best[name], time.process_time() - start)
    return best


def peak_growth(function: Callable[[], None]) -> int:
    """Bytes by which the peak resident memory of a forked child grows while it runs ``function``."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:

        def status(key: str) -> int:
            lines = Path("/proc/self/status").read_text().splitlines()
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

        before = status("VmRSS:")
        function()
        os.write(write, str(status("VmHWM:") - before).encode())
        os._exit(0)
    os.waitpid(child, 0)
    return int(os.read(read, 64))


def log_prob_memory(tokens: int = 2048, vocab: int = 49152, hidden: int = 64) -> dict[str, float]:
    """Peak memory of log-prob, entropy and gradients for a real vocabulary."""
    torch.manual_seed(0)
    states = torch.randn(tokens, hidden, requires_grad=True)
    weight = torch.randn(vocab, hidden, requires_grad=True)
    targets = torch.randint(0, vocab, (tokens,))

    def naive() -> None:
        log_p = torch.log_softmax((states @ weight.t()).float(), -1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        (log_p.gather(1, targets[:, None])[:, 0] + entropy).sum().backward()

    def chunked() -> None:
        log_probs, entropy = token_log_probs(states, weight, None, targets, entropy=True)
        assert entropy is not None
        (log_probs + entropy).sum().backward()

    mib = {"naive_mib": peak_growth(naive) / 2**20, "chunked_mib": peak_growth(chunked) / 2**20}
    return {**{k: round(v, 1) for k, v in mib.items()}, "ratio": round(mib["naive_mib"] / mib["chunked_mib"], 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=96)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--prompt-length", type=int, nargs=2, default=(16, 32))
    parser.add_argument("--response-length", type=int, nargs=2, default=(4, 12))
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)

    memory = log_prob_memory()
    path = tempfile.mkdtemp(prefix="bench-engine-")
    Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=104,
            hidden_size=args.hidden,
            intermediate_size=3 * args.hidden,
            num_hidden_layers=args.layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=True,
        )
    ).save_pretrained(path)
    batch = make_batch(args.prompts, args.samples, tuple(args.prompt_length), tuple(args.response_length))
    rows = args.prompts * args.samples // MINI_BATCHES
    minis = [{k: v[i * rows : (i + 1) * rows] for k, v in batch.items()} for i in range(MINI_BATCHES)]

    plain = Plain(path)
    engines = {
        "engine": make_engine(path),
        "packed": make_engine(path, share=False),
        "padded": make_engine(path, packed=False),
        "sharded": make_engine(path, ShardedEngine),
    }

    def update(engine: FSDPEngine) -> Callable[[], None]:
        def run() -> None:
            for mini in minis:
                engine.train_batch(mini, loss, want=LOG_PROBS, micro=MicroBatching())

        return run

    work: dict[str, Callable[[], None]] = {f"update/{name}": update(engine) for name, engine in engines.items()}
    work["update/plain"] = lambda: plain.update(minis)
    work["log_probs/plain"] = lambda: plain.evaluate(minis)
    for name in ("engine", "packed", "padded"):
        engine = engines[name]
        work[f"log_probs/{name}"] = lambda engine=engine: engine.forward(  # type: ignore[misc]
            batch, LOG_PROBS, micro=MicroBatching(size=rows)
        )
    seconds = best_of(args.repeats, work)
    for name, value in seconds.items():
        print(f"{name:22s} {value:.3f} CPU-s", file=sys.stderr)

    def ratio(other: str, ours: str) -> float:
        return round(seconds[other] / seconds[ours], 2)

    result = {
        "benchmark": "engine",
        "rows": args.prompts * args.samples,
        "parameters": sum(p.numel() for p in plain.model.parameters()),
        "update_cpu_s": round(seconds["update/engine"], 3),
        "log_probs_cpu_s": round(seconds["log_probs/engine"], 3),
        "update_vs_plain": ratio("update/plain", "update/engine"),
        "log_probs_vs_plain": ratio("log_probs/plain", "log_probs/engine"),
        "update_padded": ratio("update/padded", "update/engine"),
        "update_packed": ratio("update/packed", "update/engine"),
        "packed_vs_padded": ratio("update/padded", "update/packed"),
        "log_probs_padded": ratio("log_probs/padded", "log_probs/engine"),
        "log_prob_memory_naive": memory["ratio"],
        "log_prob_memory": memory,
        "fully_shard_cost": ratio("update/sharded", "update/engine"),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
