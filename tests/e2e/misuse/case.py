"""A misuse: what is done, and what must come of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

PROGRAMS = ("train", "sft", "preference", "generate", "eval", "selftest", "merge", "explain")

#: what works: program -> words of the command line
BASE: Mapping[str, tuple[str, ...]] = {
    "train": (
        "data.train_files={task}/train.parquet",
        "data.val_files={task}/val.parquet",
        "data.train_batch_size=8",
        "data.max_prompt_length=24",
        "data.max_response_length=8",
        "custom_reward_function.path={task}/reward.py",
        "actor_rollout_ref.model.path={model}",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "actor_rollout_ref.rollout.name=hf",
        "actor_rollout_ref.rollout.n=2",
        "algorithm.adv_estimator=grpo",
        "trainer.device=cpu",
        "trainer.controller=local",
        "trainer.nnodes=1",
        "trainer.n_gpus_per_node=1",
        "trainer.total_training_steps=2",
        "trainer.val_before_train=False",
        "trainer.logger=[console]",
        "trainer.default_local_dir={tmp}/out",
    ),
    "sft": (
        "data.train_files={task}/sft.jsonl",
        "data.train_batch_size=8",
        "data.max_length=16",
        "model.path={model}",
        "optim.lr=1e-3",
        "trainer.total_training_steps=2",
        "trainer.device=cpu",
        "trainer.logger=[console]",
        "trainer.default_local_dir={tmp}/out",
    ),
    "preference": (
        "objective=dpo",
        "data.train_files={task}/pairs.jsonl",
        "data.train_batch_size=8",
        "data.max_length=16",
        "model.path={model}",
        "optim.lr=1e-3",
        "trainer.total_training_steps=2",
        "trainer.device=cpu",
        "trainer.logger=[console]",
        "trainer.default_local_dir={tmp}/out",
    ),
    "generate": (
        "data.path={task}/val.parquet",
        "data.output_path={tmp}/out/answers.jsonl",
        "data.max_prompt_length=24",
        "data.max_response_length=6",
        "model.path={model}",
        "trainer.controller=local",
        "trainer.device=cpu",
    ),
    "eval": (
        "data.path={task}/answers.jsonl",
        "data.output_path={tmp}/out/result.json",
        "custom_reward_function.path={task}/reward.py",
    ),
    "explain": ("memory", "actor_rollout_ref.model.path={model}", "trainer.device=cpu"),
    "selftest": (),
    "merge": (),
}


@dataclass
class Place:
    """Where a case runs; made anew for each.

    Attributes:
        tmp: an empty directory, the working directory of the command.
        task: files of the base commands, read-only for cases.
        model: directory of a tiny model, read-only for cases.
        changes: overrides of the base command; ``prepare`` may add to them.
        env: changes of the environment; ``prepare`` may add to them.
    """

    tmp: Path
    task: Path
    model: Path
    changes: list[str] = field(default_factory=list)
    env: dict[str, str | None] = field(default_factory=dict)

    @property
    def out(self) -> Path:
        """The output directory of the base commands."""
        return self.tmp / "out"

    def fill(self, text: str) -> str:
        """Replace ``{tmp}``, ``{task}`` and ``{model}``."""
        for name in ("tmp", "task", "model"):
            text = text.replace(f"{{{name}}}", str(getattr(self, name)))
        return text


@dataclass
class Outcome:
    """What came of a command.

    Attributes:
        code: exit code; negative: the signal that ended it.
        stdout, stderr: text, invalid bytes replaced.
        seconds: of wall time, without the time that the main thread waited for a free core.
        wall: all seconds.
        timed_out: it was ended by the test.
    """

    code: int
    stdout: str
    stderr: str
    seconds: float
    wall: float
    timed_out: bool = False


@dataclass(frozen=True)
class Case:
    """One misuse; see the package's docstring.

    Attributes:
        name: unique within all tables; the test's id.
        program: subcommand of ``verl``.
        changes: ``key=value`` words that replace or join those of the base command; ``key=None!`` removes a key.
        code: the right exit code; several where any of them is right.
        words: text that the message must contain, on standard error.
        absent: text that must be neither on standard error nor on standard output.
        environment: changed variables; None removes one.
        prepare: makes the files of the case.
        argv: the whole command line after the program's name, instead of base and changes.
        fresh: a new interpreter instead of a fork.
        stdout: ``pipe``, ``closed``, ``broken``, ``full`` or ``tty``.
        during: called beside the command with its process id and the place.
        leaves: globs of what may be in the output directory afterwards.
        limit_s: honest seconds that it may take.
        messages: how many error lines there may be; 0 for a case that ends well.
        quotes_traceback: the message shows where the user's own code failed.
        check: further checks.
        skip: called before; a text is the reason why the case cannot run here.
    """

    name: str
    program: str
    changes: Sequence[str] = ()
    code: int | tuple[int, ...] = 2
    words: Sequence[str] = ()
    absent: Sequence[str] = ()
    environment: Mapping[str, str | None] = field(default_factory=dict)
    prepare: Callable[[Place], None] | None = None
    argv: Sequence[str] | None = None
    fresh: bool = False
    stdout: str = "pipe"
    during: Callable[[int, Place], None] | None = None
    leaves: Sequence[str] = ()
    limit_s: float = 15.0
    messages: int = 1
    quotes_traceback: bool = False
    check: Callable[[Place, Outcome], None] | None = None
    skip: Callable[[], str | None] | None = None

    def command(self, place: Place) -> list[str]:
        """The words after the program's name."""
        if self.argv is not None:
            return [place.fill(word) for word in self.argv]
        words: dict[str, str] = {}
        for word in (*BASE[self.program], *place.changes):
            key, sign, value = word.partition("=")
            if value == "None!":
                words.pop(key, None)
            else:
                words[key] = f"{key}{sign}{value}"
        return [place.fill(word) for word in words.values()]
