"""The other side of ``bench_step.py``: TRL's GRPOTrainer on the same model, prompts, rewards and sizes.

Set for speed where it has a choice: no gradient checkpointing, no reference model (``beta=0``), generation once for all
mini-batches of a step, old log-probabilities only where several updates need them, nothing written or logged.
"""

from __future__ import annotations

import sys
from typing import Any

import pyarrow.parquet as pq
import torch
import transformers
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from step.protocol import Reporter
from step.workload import Workload, coin


class MeasuredTrainer(GRPOTrainer):
    """Times the two phases that have methods of their own; the update is what is left."""

    reporter: Reporter

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        with self.reporter.phase("generate"):
            result = super()._generate_single_turn(*args, **kwargs)
        tokens = sum(len(ids) for ids in result[0])
        self.reporter.add(tokens=tokens, rows=len(result[0]))
        return result

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)
        with self.reporter.phase("log_probs"):
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)


class StepByStep(transformers.TrainerCallback):
    """Waits before every step that generates; one such step is ``updates`` optimizer steps."""

    def __init__(self, reporter: Reporter, updates: int) -> None:
        self.reporter = reporter
        self.updates = updates

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self.updates == 0:
            self.reporter.wait()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self.updates == 0:
            for phases in (self.reporter.cpu, self.reporter.wall):
                phases.setdefault("log_probs", 0.0)
            self.reporter.finish()


def make_config(work: Workload) -> GRPOConfig:
    """TRL's settings for the work."""
    mini_batch = work.prompts * work.n // work.mini_batches
    micro = work.micro_rows or mini_batch
    settings: dict[str, Any] = {
        "output_dir": "outputs/bench_step/trl",
        "use_cpu": True,
        "bf16": work.precision == "bfloat16",
        "fp16": False,
        "gradient_checkpointing": False,
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": mini_batch // micro,
        "steps_per_generation": work.prompts * work.n // micro,
        "num_generations": work.n,
        "num_iterations": 1,
        "max_completion_length": work.response_length,
        "beta": 0.0,
        "loss_type": "dapo",  # a mean over tokens
        "scale_rewards": "group",
        "epsilon": 0.2,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "learning_rate": work.lr,
        "adam_beta1": work.betas[0],
        "adam_beta2": work.betas[1],
        "weight_decay": 0.01,
        "max_grad_norm": 1.0,
        "optim": "adamw_torch_fused",
        "lr_scheduler_type": "cosine_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
        "warmup_steps": work.warmup * work.mini_batches,
        "max_steps": work.total_steps * work.mini_batches,
        "model_init_kwargs": {"dtype": "bfloat16" if work.precision == "pure-bfloat16" else "float32"},
        "logging_strategy": "no",
        "save_strategy": "no",
        "eval_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "seed": work.seed,
        "dataloader_pin_memory": False,
    }
    if work.fixed:
        settings["generation_kwargs"] = {"min_new_tokens": work.response_length}
    for option in work.options:
        name, _, value = option.partition("=")
        settings[name] = {"true": True, "false": False}.get(value.lower(), value)
    return GRPOConfig(**settings)


def main() -> None:
    work = Workload.from_json(sys.argv[1])
    torch.set_num_threads(work.threads)
    reporter = Reporter()
    rows = pq.read_table(work.prompts_file).to_pylist()
    data = Dataset.from_list(
        [{"prompt": r["prompt"], "source": r["data_source"], "truth": r["reward_model"]["ground_truth"]} for r in rows]
    )

    def reward(completions: list[Any], source: list[str], truth: list[str], **_: Any) -> list[float]:
        texts = [completion[0]["content"] for completion in completions]
        if work.reward == "coin":
            scores = [coin(text) for text in texts]
        else:
            from verl.rewards.default import default_compute_score

            scores = [float(default_compute_score(*row)) for row in zip(source, texts, truth, strict=True)]
        reporter.add(reward=sum(scores) / len(scores))
        return scores

    trainer = MeasuredTrainer(
        model=work.model,
        reward_funcs=reward,
        args=make_config(work),
        train_dataset=data,
        callbacks=[StepByStep(reporter, work.mini_batches)],
    )
    trainer.reporter = reporter
    trainer.train()
    reporter.wait()  # ready, as after any other step; there is none left to do


if __name__ == "__main__":
    main()
