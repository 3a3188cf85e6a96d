"""The training run: length, devices, saving, validation, logging."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from verl.config.base import Config, opt

LOGGERS = ("console", "tensorboard", "wandb", "mlflow", "swanlab", "trackio", "file")


@dataclass
class RunConfig(Config):
    """What the trainers of reinforcement learning and of supervised fine-tuning share."""

    project_name: str = opt("verl", "Project in the trackers and in default_local_dir.", affects="report")
    experiment_name: str = opt("default", "Run in the trackers and in default_local_dir.", affects="report")
    logger: list[str] = opt(["console"], "Where metrics go: one tracker or a list.", choices=LOGGERS, affects="report")
    total_epochs: int = opt(30, "Passes over the training data.", ge=1, affects="length")
    total_training_steps: int | None = opt(None, "Training steps; not given = total_epochs.", ge=1, affects="length")
    nnodes: int = opt(1, "Nodes.", ge=1, affects="speed")
    n_gpus_per_node: int = opt(8, "GPUs per node; on CPU the number of worker processes.", ge=1, affects="speed")
    device: str = opt(
        "auto", "Device; auto = CUDA where there is a GPU, else CPU.", choices=("auto", "cpu", "cuda"), affects="speed"
    )
    seed: int = opt(1, "Seed of the run; every other seed derives from it.", ge=0)
    deterministic: bool = opt(
        False,
        "Use only algorithms whose result depends on nothing but their input, on GPUs too; an operation without one is "
        "an error.",
        affects="speed",
    )
    save_freq: int = opt(-1, "Save every so many steps and at the end; -1 = never.", ge=-1, affects="place")
    test_freq: int = opt(
        -1, "Validate every so many steps and at the end; -1 = never during training.", ge=-1, affects="report"
    )
    default_local_dir: str = opt(
        "checkpoints/${trainer.project_name}/${trainer.experiment_name}",
        "Directory of the run: checkpoints, the final model, the record of what ran.",
        affects="place",
    )
    resume_mode: str = opt(
        "auto",
        "auto = go on from the last checkpoint if there is one; disable; resume_path = from resume_from_path.",
        choices=("auto", "disable", "resume_path"),
        affects="place",
    )
    resume_from_path: str | None = opt(None, "Checkpoint (a global_step_N directory) to go on from.", affects="place")
    on_resume_mismatch: str = opt(
        "refuse",
        "What it means that a checkpoint was made with other rows, models, files or settings that decide numbers: "
        "refuse = the run ends with the list of differences; allow = they are logged and the run resumes under the new "
        "ones.",
        choices=("refuse", "allow"),
        affects="place",
    )
    save_final_model: bool = opt(
        True,
        "Write the trained model after the last step as a Hugging Face directory, default_local_dir/huggingface.",
        affects="place",
    )
    max_ckpt_to_keep: int | None = opt(None, "Checkpoints to keep, the newest; not given = all.", ge=1, affects="place")
    best_ckpt_metric: str | None = opt(
        None,
        "Metric that ranks checkpoints, such as val-core/gsm8k/reward/mean@1; the best ones stay beside the newest.",
        affects="place",
    )
    best_ckpt_mode: str = opt(
        "max", "Whether a large or a small best_ckpt_metric is good.", choices=("max", "min"), affects="place"
    )
    max_best_ckpt_to_keep: int = opt(
        1, "Checkpoints to keep by best_ckpt_metric, whatever their age.", ge=1, affects="place"
    )
    on_save_error: str = opt(
        "stop",
        "What a checkpoint that cannot be written means (full disk, read-only directory): the run ends, or trains on "
        "and tries again at the next save.",
        choices=("stop", "continue"),
        affects="limit",
    )
    on_nonfinite: str = opt(
        "skip",
        "What an update means whose loss or gradient is NaN or infinite and which is therefore left out: nothing more; "
        "the run ends; or models and optimizers go back to the last checkpoint and train on with the next data.",
        choices=("skip", "stop", "rollback"),
        affects="limit",
    )
    verify_checkpoint: bool = opt(
        True,
        "Compare the files of a checkpoint with its checksums before resuming; a damaged one is passed over.",
        affects="limit",
    )
    time_limit_s: float | None = opt(
        None,
        "Seconds after its start at which the run must have saved and ended, as a batch system demands.",
        gt=0,
        affects="length",
    )
    esi_redundant_time: float = opt(
        0.0,
        "Seconds to spare between the last save and the time limit, or the end of the rented machine.",
        ge=0,
        affects="length",
    )

    @property
    def world_size(self) -> int:
        """Worker processes of a role: nnodes times n_gpus_per_node."""
        return self.nnodes * self.n_gpus_per_node

    def problems(self) -> Iterator[str]:
        for name in ("save_freq", "test_freq"):
            if getattr(self, name) == 0:
                yield f"{name}=0: must be -1 (never) or a positive number of steps"
        if self.resume_mode == "resume_path" and not self.resume_from_path:
            yield "resume_from_path=None: resume_mode=resume_path needs the global_step_N directory to go on from"
        if self.resume_from_path and self.resume_mode != "resume_path":
            yield (
                f"resume_from_path={self.resume_from_path!r}: is read only with resume_mode=resume_path, "
                f"which is {self.resume_mode!r}"
            )
        metric = self.best_ckpt_metric
        validated = self.test_freq > 0 and self.save_freq % self.test_freq == 0
        if metric and metric.startswith("val") and self.save_freq > 0 and not validated:
            yield (
                f"best_ckpt_metric={metric!r}: every checkpoint needs a validation of its own step; let "
                f"test_freq={self.test_freq} divide save_freq={self.save_freq}"
            )
        if not self.logger:
            yield f"logger=[]: name at least one of {', '.join(LOGGERS)}"


@dataclass
class TrainerConfig(RunConfig):
    """The reinforcement-learning run."""

    controller: str = opt(
        "ray",
        "ray = workers are processes on Ray; local = one worker inside the controller, for debugging.",
        choices=("ray", "local"),
        affects="speed",
    )
    cpu_threads_per_worker: int | None = opt(
        None,
        "Threads of each worker process on CPU; not given = the cores divided by the workers.",
        ge=1,
        affects="speed",
    )
    max_restarts: int = opt(
        0,
        "How often the run starts its workers again, from the last checkpoint, when one of them fails or dies.",
        ge=0,
        affects="limit",
    )
    worker_timeout_s: float | None = opt(
        7200.0,
        "Longest time for one call of the workers (loading the model, a generation, an update), in seconds, beyond "
        "which they count as failed; meant to be far above the longest call of a healthy run, first ones that load or "
        "compile and long answers included, and to end only what hangs; null = no limit but that of collectives "
        "(actor_rollout_ref.nccl_timeout).",
        gt=0,
        affects="limit",
    )
    critic_warmup: int = opt(0, "Steps at the start that train only the critic.", ge=0)
    balance_batch: bool = opt(True, "Spread long and short samples evenly over the ranks.", affects="speed")
    val_before_train: bool = opt(True, "Validate before the first step.", affects="report")
    val_only: bool = opt(False, "Validate once and stop.", affects="report")
    log_val_generations: int = opt(0, "Validation samples to send to the trackers.", ge=0, affects="report")
    rollout_data_dir: str | None = opt(None, "Directory for each training step's samples as JSONL.", affects="place")
    validation_data_dir: str | None = opt(None, "Directory for each validation's samples as JSONL.", affects="place")
    max_actor_ckpt_to_keep: int | None = opt(
        None, "Checkpoints of the policy to keep.", ge=1, inherits="trainer.max_ckpt_to_keep", affects="place"
    )
    max_critic_ckpt_to_keep: int | None = opt(
        None,
        "Checkpoints of the critic, and of a trained reward model, to keep.",
        ge=1,
        inherits="trainer.max_ckpt_to_keep",
        affects="place",
    )
    del_local_ckpt_after_load: bool = opt(
        False, "Delete a checkpoint once it has been loaded by every rank.", affects="place"
    )
