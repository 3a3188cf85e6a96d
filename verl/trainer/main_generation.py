"""Answer every prompt of a data set: ``python -m verl.trainer.main_generation key=value ...``.

    verl generate data.path=test.parquet data.output_path=answers.parquet data.n_samples=8 model.path=merged

Responses are written down batch by batch beside the output; the same command started again goes on after the last
whole batch. A response depends on the seed, the prompt's row and its number alone, not on batches or workers.
"""

from __future__ import annotations

import json
import logging
import shutil
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.config import to_dict
from verl.config.cli import parse_cli
from verl.config.generation import GenerationConfig
from verl.errors import ConfigError, DataError
from verl.utils.exit_status import exit_code, start_program
from verl.utils.fs import atomic_write_text, ensure_writable_dir
from verl.utils.json_text import dumps_json
from verl.utils.logging import redact
from verl.utils.run_lock import locked
from verl.utils.stopping import StopRequested, StopWatch, account, state_of_work

if TYPE_CHECKING:
    from verl.data.files import Rows
    from verl.protocol import DataProto
    from verl.single_controller.base import WorkerGroup

logger = logging.getLogger(__name__)

SETTINGS = "settings.json"
#: column with the number of tokens of each response
LENGTHS = "response_lengths"


class Generator:
    """Answers the prompts that are not answered yet.

    Args:
        config: the configuration.
    """

    def __init__(self, config: GenerationConfig) -> None:
        from verl.data import forms
        from verl.data.files import Rows
        from verl.data.images import RowImageReader
        from verl.data.row_gate import Column, RowGate
        from verl.models.directory import check_model
        from verl.utils.tokenizer import load_processor, load_tokenizer

        self.config = config
        self.output = Path(str(config.data.output_path)).expanduser().absolute()
        if self.output.exists():
            raise ConfigError(f"data.output_path={str(self.output)!r} is there already; remove it, or choose another")
        ensure_writable_dir(self.output.parent, purpose="directory of data.output_path")
        model = config.model
        check_model(model, "model", trained=False, rollout=config.rollout.name)
        self.tokenizer = load_tokenizer(model.tokenizer_path or model.path, trust_remote_code=model.trust_remote_code)
        self.rows: Rows = Rows(config.data.path, required=[config.data.prompt_key])
        self._check_columns()
        processor = load_processor(str(model.path), model.trust_remote_code)
        self.images = RowImageReader(self.rows, config.data, processor)
        if self.images.present:
            self._check_images()
        limit = config.data.max_samples
        self.count = len(self.rows) if limit < 0 else min(limit, len(self.rows))
        prompt = partial(forms.prompt, parts=self.images.present)
        self.gate = RowGate(self.rows, [Column(config.data.prompt_key, prompt, required=True)])
        self.parts = self.output.with_name(f".{self.output.stem}.parts")

    def run(self) -> Path:
        """Answer everything and write the output; returns its path."""
        self._look_through()
        self.parts.mkdir(exist_ok=True)
        with locked({"data.output_path": self.parts}):
            return self._run()

    def _run(self) -> Path:
        self._open_parts()
        size = self.config.data.batch_size
        todo = [start for start in range(0, self.count, size) if not self._part(start).exists()]
        if done := -(-self.count // size) - len(todo):
            logger.info("%d of %d batches are there from before", done, done + len(todo))
        with ExitStack() as at_end:
            if todo:
                rollout = self._start(at_end)
            for number, start in enumerate(todo, 1):
                self._write_part(start, self._answer(rollout, range(start, min(start + size, self.count))))
                logger.info("batch %d of %d", number, len(todo))
        self._join()
        return self.output

    def _check_columns(self) -> None:
        """Refuse data whose columns the responses would replace."""
        for name in dict.fromkeys((self.config.data.response_key, LENGTHS)):
            if name in self.rows.columns:
                remedy = "rename it in the data files" if name == LENGTHS else "set data.response_key to another name"
                raise DataError(f"the data has a column {name!r} already, and the responses would replace it; {remedy}")

    def _look_through(self) -> None:
        """Check prompts before anything is started; those with images, which cost much, by their form alone."""
        from verl.data.row_gate import Problems, look_through, looks_at

        problems = Problems()
        look = self.gate.__getitem__ if self.images.present else self._prompt
        look_through(looks_at(look, range(self.count), problems), self.count, problems)

    def _check_images(self) -> None:
        """Refuse engines and models that read none."""
        from verl.trainer.image_checks import refuse
        from verl.trainer.ppo.checks import image_problems

        refuse([problem.removeprefix("actor_rollout_ref.") for problem in image_problems(self.config.sealed_run())])

    # ---- generating ---------------------------------------------------------------------------------------------

    def _start(self, at_end: ExitStack) -> WorkerGroup:
        """The workers with the model's weights in the rollout engine."""
        from verl.models.loading import import_external_lib
        from verl.trainer.ppo.placement import build_worker_groups
        from verl.trainer.ray_session import ray_session
        from verl.utils.device import resolve_device

        run = self.config.sealed_run()
        import_external_lib(self.config.model.external_lib)
        if self.config.trainer.controller == "ray":
            at_end.enter_context(ray_session(run))
        groups = build_worker_groups(run, resolve_device(self.config.trainer.device), total_steps=1)
        at_end.callback(groups.shutdown)
        groups.actor_rollout.sync_weights(version=0)
        return groups.actor_rollout

    def _answer(self, rollout: WorkerGroup, numbers: range) -> list[dict[str, Any]]:
        """The responses of some rows."""
        from verl.data.images import IMAGE_FIELD
        from verl.trainer.ppo.sources.base import generate, with_samples

        n = self.config.data.n_samples
        batch = with_samples(self._prompts(numbers), n, uid_prefix="row")
        batch.batch["sample_index"] += numbers.start * n
        answers = generate(rollout, batch, step=0, validate=False, row_fields=(IMAGE_FIELD,))
        responses = answers.batch["responses"]
        present = answers.batch["attention_mask"][:, -responses.shape[1] :].bool()
        tokens = [row[keep].tolist() for row, keep in zip(responses, present, strict=True)]
        texts = self.tokenizer.batch_decode(tokens, skip_special_tokens=True)
        return [
            {
                "row": number,
                "responses": texts[place * n : (place + 1) * n],
                LENGTHS: [len(ids) for ids in tokens[place * n : (place + 1) * n]],
            }
            for place, number in enumerate(numbers)
        ]

    def _prompts(self, numbers: range) -> DataProto:
        from verl.data.collate import collate_fn
        from verl.data.images import IMAGE_FIELD
        from verl.data.rl_dataset import left_padded
        from verl.protocol import DataProto

        width = self.config.data.max_prompt_length
        items: list[dict[str, Any]] = []
        for number in numbers:
            ids, images = self._prompt(number)
            item: dict[str, Any] = left_padded(ids, width, self.tokenizer.pad_token_id)
            items.append({**item, IMAGE_FIELD: images} if self.images.present else item)
        return DataProto.from_single_dict(collate_fn(items))

    def _prompt(self, number: int) -> tuple[list[int], dict[str, Any] | None]:
        """The tokens of a row's prompt, and its images as the model reads them."""
        from verl.data.row_gate import RowError

        data = self.config.data
        try:
            ids, images = self._tokens(number)
            limit = data.max_prompt_length
            if not ids or (len(ids) > limit and (data.truncation == "error" or images is not None)):
                remedy = (
                    "cut prompts with data.truncation=left or right"
                    if images is None
                    else "lower data.image_max_pixels; prompts with images are not cut"
                )
                raise DataError(
                    f"the prompt has {len(ids)} tokens, allowed are 1 to data.max_prompt_length={limit}; raise it, or "
                    f"{remedy}"
                )
        except RowError:
            raise
        except DataError as error:
            raise DataError(f"{self.rows.place(number)}, column {data.prompt_key!r}: {error}") from error
        return (ids[-limit:] if data.truncation == "left" else ids[:limit]), images

    def _tokens(self, number: int) -> tuple[list[int], dict[str, Any] | None]:
        from verl.data.chat import encode, encode_plain, render
        from verl.data.images import reject_images

        data, row = self.config.data, self.gate[number]
        reject_images(row, "this command", ["videos"])
        images = self.images.read(number, row)
        prompt = row[data.prompt_key]
        if isinstance(prompt, str) and getattr(self.tokenizer, "chat_template", None):
            prompt = [{"role": "user", "content": prompt}]
        if not isinstance(prompt, str):
            messages, kwargs = self.images.messages(row, prompt), data.apply_chat_template_kwargs
            text = render(self.tokenizer, messages, add_generation_prompt=True, template_kwargs=kwargs)
            ids = encode(self.tokenizer, text)
        elif images is not None:
            raise DataError("the row has images, and the tokenizer no chat template that says where they stand")
        else:
            ids = encode_plain(self.tokenizer, prompt)
        return self.images.expand(ids, [0] * len(ids), images)[0], images

    # ---- files --------------------------------------------------------------------------------------------------

    def _open_parts(self) -> None:
        """The directory of finished batches; what lies there must be of the same command."""
        values = to_dict(self.config)
        values["data"].pop("output_path")
        for key in ("nnodes", "n_gpus_per_node", "controller"):
            values["trainer"].pop(key)
        rows = self.rows.fingerprint(range(self.count))
        values = redact({**values, "ray_kwargs": None, "rows": self.count, "rows_sha256": rows})
        settings = dumps_json(values, indent=1, sort_keys=True)
        path = self.parts / SETTINGS
        if not path.exists():
            atomic_write_text(path, settings)
        elif path.read_text("utf-8") != settings:
            raise ConfigError(
                f"{self.parts} holds batches of another configuration or data set; give the command of before, remove "
                "the directory, or choose another data.output_path"
            )

    def _part(self, start: int) -> Path:
        return self.parts / f"{start:09d}.jsonl"

    def _write_part(self, start: int, answers: list[dict[str, Any]]) -> None:
        lines = (dumps_json(answer) + "\n" for answer in answers)
        atomic_write_text(self._part(start), "".join(lines))

    def _join(self) -> None:
        """Put the rows and their responses into the output, whole or not at all."""
        answers = [
            json.loads(line)
            for start in range(0, self.count, self.config.data.batch_size)
            for line in self._part(start).read_bytes().split(b"\n")  # text may hold other ends of lines
            if line
        ]
        key = self.config.data.response_key
        rows = [self.rows[a["row"]] | {key: a["responses"], LENGTHS: a[LENGTHS]} for a in answers]
        if self.output.suffix == ".jsonl":
            text = "".join(dumps_json(row) + "\n" for row in rows)
            atomic_write_text(self.output, text)
        else:
            self._write_parquet(rows)
        shutil.rmtree(self.parts)

    def _write_parquet(self, rows: list[dict[str, Any]]) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        from verl.utils.fs import atomic_open

        try:
            table = pa.Table.from_pylist(rows)
        except pa.ArrowException as error:
            raise DataError(
                f"the rows do not fit one Parquet schema ({error}); start again with a data.output_path that ends in "
                ".jsonl: the responses are kept and not generated again"
            ) from error
        with atomic_open(self.output, "wb") as handle:
            pq.write_table(table, handle)


def run_generation(config: GenerationConfig) -> Path:
    """Answer every prompt; returns the output's path."""
    config.check_files()
    return Generator(config).run()


def main(argv: Sequence[str] | None = None) -> int:
    """Command line: exit code 0 when done, 2 for a bad configuration or bad input, 1 for a failure.

    75 is the code of a run that ended early, on SIGTERM or before a deadline: starting it again continues.
    """
    start_program()
    config = parse_cli(GenerationConfig, "generation", argv)

    watch = StopWatch()

    def work() -> bool:
        with account(lambda: "batches that were answered are kept; the same command continues after them"):
            try:
                with watch, watch.interruptible():
                    path = run_generation(config)
            except StopRequested as error:
                logger.warning("ending early: %s; %s", error, state_of_work())
                return False
        sys.stdout.write(f"the responses are in {path}\n")
        return True

    return exit_code(work)


if __name__ == "__main__":
    sys.exit(main())
