"""Build a tiny model of every causal language model type of Transformers and say what the training engine makes of it.

A line per type: ``packed`` or ``padded`` (compared with plain Transformers, and equal), ``refused`` (one sentence), or
``crash`` (something else was raised, which is a fault here). Types that cannot be made small by the usual names of
sizes are ``not built``. Run ``python tools/sweep_families.py [TYPE ...]``.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers import logging as hf_logging

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.models.families import COMMON
from tests.workers.engine.reference import make_engine
from verl.config import ModelConfig
from verl.errors import VerlError
from verl.models.directory import check_model

#: larger models would be no test of a minute
_MOST_PARAMETERS = 30_000_000
#: names of sizes beyond the common ones; each is given only to configurations that have it
_SIZES = {
    "head_dim": 16,
    "moe_intermediate_size": 24,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "index_topk": 4,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "sliding_window": 4,
    "attention_chunk_size": 4,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "ffn_dim": 48,
    "d_model": 32,
    "word_embed_proj_dim": 32,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 48,
    "shared_expert_intermediate_size": 24,
    "intermediate_size_mlp": 48,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_d_ssm": 64,
    "state_size": 8,
    "vocab_size_per_layer_input": 61,
    "hidden_size_per_layer_input": 8,
}


def build(kind: str, directory: str) -> str | None:
    """Save a tiny model of a type; returns why there is none."""
    try:
        known = AutoConfig.for_model(kind).to_dict()
        sizes = {name: value for name, value in {**COMMON, **_SIZES}.items() if name in known or name in COMMON}
        if "kv_lora_rank" in known:  # latent attention has keys for every head
            sizes["num_key_value_heads"] = 4
        config = AutoConfig.for_model(kind, **sizes)
        with torch.device("meta"):
            count = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
        if count > _MOST_PARAMETERS:
            return f"{count:,} parameters"
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(3.0)
        model.save_pretrained(directory)
    except Exception as error:  # noqa: BLE001 - a configuration that these sizes do not fit
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:100]}"
    return None


def judge(kind: str) -> tuple[str, str]:
    """Outcome and detail of one type."""
    with tempfile.TemporaryDirectory() as directory:
        if problem := build(kind, directory):
            return "not built", problem
        try:
            check_model(ModelConfig(path=directory), "model")
            engine = make_engine(directory, trained=False, model={"verify": "always"})
        except VerlError as error:
            return "refused", str(error).replace(directory, "DIR")
        except Exception as error:  # noqa: BLE001 - what is looked for
            return "crash", f"{type(error).__name__}: {error}"
        return ("packed" if engine.packed else "padded"), ""


def main(kinds: list[str]) -> int:
    """Exit code 1 where something crashes."""
    warnings.simplefilter("ignore")
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    known = sorted({config.model_type for config in AutoModelForCausalLM._model_mapping})
    counts: Counter[str] = Counter()
    for kind in kinds or known:
        outcome, detail = judge(kind)
        counts[outcome] += 1
        print(f"{outcome:10}{kind:28}{detail}", flush=True)
    print(", ".join(f"{outcome}: {count}" for outcome, count in sorted(counts.items())))
    return int(counts["crash"] > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
