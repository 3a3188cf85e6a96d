"""Dynamic sampling: only prompts whose samples differ."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from verl.config.base import Config, opt

ON_EXHAUSTED = ("error", "fill")


@dataclass
class FilterGroupsConfig(Config):
    """Dynamic sampling (DAPO): train on groups whose samples differ in outcome."""

    enable: bool = opt(False, "Draw further prompts until data.train_batch_size groups have samples that differ.")
    metric: str | None = opt(
        None,
        "What must differ: a value that the reward function reports, or seq_reward for the whole score; not given = "
        "acc where it is reported (the score before penalties), else the score.",
    )
    max_num_gen_batches: int = opt(10, "Most generation batches in one step; 0 = no limit.", ge=0, affects="limit")
    on_exhausted: str = opt(
        "error",
        "With max_num_gen_batches used up: error = end the run; fill = complete the batch with groups that carry no "
        "signal.",
        choices=ON_EXHAUSTED,
    )

    def problems(self) -> Iterator[str]:
        if self.metric == "seq_final_reward":
            yield (
                "metric='seq_final_reward': is the score less the KL penalty, which makes equal outcomes differ; use "
                "seq_reward, or leave metric out"
            )
