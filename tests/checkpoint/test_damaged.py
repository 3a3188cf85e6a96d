"""Any file of a checkpoint in any unexpected form is refused in our words, or an earlier checkpoint is taken."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.test_sft import config, rows
from verl.checkpoint.manager import MARKER_FILE, CheckpointManager
from verl.checkpoint.state import load_state
from verl.errors import VerlError
from verl.trainer.sft_trainer import build_trainer, run_sft
from verl.utils.plain_pickle import describe_damage


def save_list(path: Path) -> None:
    """A file of torch's that holds a list."""
    with path.open("wb") as handle:
        torch.save([1, 2], handle)


FORMS: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "another type": lambda path: path.write_text("[1, 2]") if path.suffix == ".json" else save_list(path),
    "junk": lambda path: path.write_bytes(bytes(range(256)) * 8),
    "folder": lambda path: (path.unlink(), path.mkdir()),
    "missing": lambda path: path.unlink(),
}
#: words that only torch, pickle or Python use
FOREIGN = ("weights_only", "PytorchStreamReader", "Traceback", "UnpicklingError", "KeyError", "object is not")


@pytest.fixture(scope="module")
def run_dir(tiny_model_dir: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps, both saved."""
    directory = tmp_path_factory.mktemp("run")
    (directory / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(24)))
    os.environ["VERL_FILE_LOGGER_PATH"] = str(directory / "metrics.jsonl")
    run_sft(settings(directory, directory / "out", tiny_model_dir, 2))
    os.environ.pop("VERL_FILE_LOGGER_PATH")
    return directory


def settings(directory: Path, out: Path, model: str, steps: int, **more: Any) -> Any:
    keys = {"trainer__total_training_steps": steps, "trainer__save_freq": 1, "trainer__save_final_model": False}
    files = (str(directory / "train.jsonl"), "")
    return config(model, files, out, **{"data__val_files": "[]", **keys, **more})


def files_of(run_dir: Path) -> list[str]:
    """Files of the newest checkpoint, and the pointer."""
    root = run_dir / "out"
    newest = [str(path.relative_to(root)) for path in (root / "global_step_2").rglob("*") if path.is_file()]
    return [*sorted(newest), "latest_checkpointed_iteration.txt"]


def in_our_words(error: BaseException) -> None:
    assert isinstance(error, VerlError), repr(error)
    for word in FOREIGN:
        assert word not in str(error), str(error)


@pytest.mark.parametrize("form", FORMS)
def test_what_is_damaged_is_passed_over_or_refused(form: str, run_dir: Path, tmp_path: Path) -> None:
    """With checksums every damage of every file is found before anything is loaded."""
    names = files_of(run_dir)
    assert len(names) > 8
    for number, name in enumerate(names):
        root = tmp_path / str(number)
        shutil.copytree(run_dir / "out", root)
        FORMS[form](root / name)
        found = CheckpointManager(root).find()
        if "global_step_2" in name:
            assert found == root / "global_step_1", name
            try:
                CheckpointManager(root).find("resume_path", root / "global_step_2")
            except VerlError as error:
                in_our_words(error)
            else:
                raise AssertionError(f"{name} was accepted")
        else:
            assert found == root / "global_step_2"


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_unchecked_a_damaged_file_is_an_error_in_our_words_or_does_not_matter(
    form: str, run_dir: Path, tmp_path: Path, tiny_model_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "metrics.jsonl"))
    for number, name in enumerate(files_of(run_dir)):
        root = tmp_path / str(number)
        shutil.copytree(run_dir / "out", root)
        FORMS[form](root / name)
        chosen = {"trainer__resume_mode": "resume_path", "trainer__resume_from_path": str(root / "global_step_2")}
        unchecked = settings(run_dir, root, tiny_model_dir, 3, trainer__verify_checkpoint=False, **chosen)
        try:
            build_trainer(unchecked).load_checkpoint()
        except Exception as error:
            in_our_words(error)


@pytest.mark.parametrize(
    "change",
    [
        {"parts": 5},
        {"parts": "actor"},
        {"parts": [1]},
        {"parts": ["../x"]},
        {"parts": None},
        {"step": "2"},
        {"step": 7},
        {"step": True},
        {"score": "good"},
        {"score": [1]},
    ],
)
def test_a_marker_of_unexpected_form_is_refused(change: dict[str, Any], run_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(run_dir / "out", tmp_path / "out")
    marker = tmp_path / "out" / "global_step_2" / MARKER_FILE
    marker.write_text(json.dumps(json.loads(marker.read_text()) | change))
    manager = CheckpointManager(tmp_path / "out")
    assert manager.find() == tmp_path / "out" / "global_step_1"
    assert manager.steps() == [1]
    assert manager.best_step() is None
    with pytest.raises(VerlError, match=MARKER_FILE):
        manager.find("resume_path", tmp_path / "out" / "global_step_2")


def test_messages_do_not_advise_to_trust_a_file(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.system, ("true",)

    torch.save({"x": Evil()}, tmp_path / "a.pt")
    with pytest.raises(VerlError, match="it refers to posix.system") as caught:
        load_state(tmp_path / "a.pt")
    assert "weights_only" not in str(caught.value)
    assert describe_damage(EOFError()) == "it is empty or ends too early"
