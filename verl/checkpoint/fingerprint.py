"""What decides the numbers of a run, kept in its checkpoints: settings, data rows, models and files of code.

A run that resumes is compared with the checkpoint's fingerprint, so that two experiments are never mixed unnoticed.
What each key affects is declared with the key (:data:`verl.config.base.AFFECTS`).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl.config.base import DECISIVE, Config, to_dict
from verl.config.schema import Key, keys_of
from verl.errors import CheckpointError, ConfigError
from verl.utils.json_text import dumps_json
from verl.utils.logging import redact

logger = logging.getLogger(__name__)

FINGERPRINT_FILE = "fingerprint.json"
FORMAT = 1
#: keys whose value is the address of contents, which are compared instead
_BY_CONTENT = frozenset({"rows", "file", "model"})

#: name of a part, such as a file of a model directory -> digest
Digests = Mapping[str, str]


@dataclass(frozen=True)
class Difference:
    """One thing that a run has and a checkpoint has otherwise.

    Attributes:
        key: dotted path.
        text: what differs.
        decisive: whether it decides what is trained.
    """

    key: str
    text: str
    decisive: bool


@dataclass(frozen=True)
class Fingerprint:
    """Settings and contents of a run.

    Attributes:
        schema: root class of the configuration.
        settings: dotted key -> value, of every key that is in use. Secrets are hidden.
        contents: dotted key -> digests of what its value names.
    """

    schema: type[Config]
    settings: Mapping[str, Any]
    contents: Mapping[str, Digests] = field(default_factory=dict)

    @classmethod
    def of(cls, config: Config, contents: Mapping[str, Digests]) -> Fingerprint:
        """The fingerprint of a run.

        Args:
            config: the whole configuration.
            contents: dotted key -> digests, for keys that name rows, files or models.
        """
        values: dict[str, Any] = redact(to_dict(config))
        settings: dict[str, Any] = {}
        for key in used_keys(config):
            value = _value(values, key.path)
            settings.update(_leaves(value, key.path) if key.kind == "free" else {key.path: value})
        # what a checkpoint holds is JSON, so that a comparison in memory sees what one with a file sees
        return cls(type(config), json.loads(dumps_json(settings)), dict(contents))

    def save(self, directory: Path) -> None:
        """Write ``fingerprint.json`` into a directory that becomes visible later, as a whole."""
        (directory / FINGERPRINT_FILE).write_text(dumps_json(self.as_json(), indent=1) + "\n", "utf-8")

    def as_json(self) -> dict[str, Any]:
        """The fingerprint as plain values."""
        return {"format": FORMAT, "settings": dict(self.settings), "contents": dict(self.contents)}

    def differences(self, saved: Mapping[str, Any]) -> list[Difference]:
        """What this run has otherwise than a saved one, in the order of the keys.

        Args:
            saved: from :meth:`as_json` of the other run.

        Raises:
            CheckpointError: the values have another form.
        """
        settings, contents = saved.get("settings"), saved.get("contents")
        if saved.get("format") != FORMAT or not isinstance(settings, dict) or not isinstance(contents, dict):
            raise CheckpointError(
                f"{FINGERPRINT_FILE} has format {saved.get('format')!r}, and this version reads {FORMAT}"
            )
        found = [*self._settings_that_differ(settings), *self._contents_that_differ(contents)]
        order = {path: index for index, path in enumerate(keys_of(self.schema))}
        return sorted(found, key=lambda difference: order.get(difference.key, len(order)))

    def _settings_that_differ(self, saved: Mapping[str, Any]) -> Iterator[Difference]:
        keys = keys_of(self.schema)
        changed: dict[str, tuple[Any, Any]] = {}
        for path in dict.fromkeys([*self.settings, *saved]):
            key = _key_of(path, keys)
            if key is None:  # of another version
                continue
            if path not in self.settings and key.kind != "free":
                continue  # not in use now
            old = saved[path] if path in saved else _default(key)
            new = self.settings.get(path)
            if old != new and old is not _UNKNOWN:
                changed[path] = (old, new)
        for path, (old, new) in changed.items():
            key = _key_of(path, keys)
            assert key is not None
            source = str(key.default)[2:-1] if str(key.default).startswith("${") else None
            if source in changed and changed[source] == (old, new):
                continue  # follows from the other one
            decisive = key.affects in DECISIVE
            if key.affects in _BY_CONTENT and old is not None and new is not None:
                decisive = False  # another address; the contents are compared
            yield Difference(path, f"{old!r} -> {new!r}", decisive)

    def _contents_that_differ(self, saved: Mapping[str, Any]) -> Iterator[Difference]:
        keys = keys_of(self.schema)
        for path, digests in self.contents.items():
            old = saved.get(path)
            key = _key_of(path, keys)
            if not isinstance(old, dict) or key is None or self.settings.get(path) is None:
                continue
            if sorted(old.values()) == sorted(digests.values()):
                continue
            source = str(key.default)[2:-1] if str(key.default).startswith("${") else None
            if source is not None and self.contents.get(source) == digests:
                continue  # the same directory under another key
            names = sorted(name for name in {*old, *digests} if old.get(name) != digests.get(name))
            what = ", ".join(_change(name, old.get(name), digests.get(name)) for name in names[:4])
            more = f" and {len(names) - 4} more" if len(names) > 4 else ""
            yield Difference(path, f"{what}{more}", self._is_decisive(key))

    def _is_decisive(self, key: Key) -> bool:
        """Whether other contents count: validation rows only where they choose the checkpoints that stay."""
        if key.affects in DECISIVE:
            return True
        metric = self.settings.get("trainer.best_ckpt_metric")
        return key.path == "data.val_files" and isinstance(metric, str) and metric.startswith("val")


def used_keys(config: Config) -> Iterator[Key]:
    """The keys of a configuration less those of sections that are idle (``config.idle_sections``)."""
    idle = tuple(f"{path}." for path in getattr(config, "idle_sections", lambda: ())())
    for key in keys_of(type(config)).values():
        if key.kind != "section" and not key.path.startswith(idle):
            yield key


def compare(fingerprint: Fingerprint, directory: Path, file: Path, policy: str) -> None:
    """Compare a run with the one that made a checkpoint or a model, before it takes its place.

    Args:
        fingerprint: of this run.
        directory: of the checkpoint or model, for messages.
        file: what holds the fingerprint of the other run.
        policy: ``trainer.on_resume_mismatch``.

    Raises:
        ConfigError: something decisive differs and the policy is ``refuse``.
        CheckpointError: the file cannot be read.
    """
    try:
        saved = json.loads(file.read_text("utf-8"))
    except FileNotFoundError:
        logger.info("%s has no %s: an earlier version saved it, so nothing is compared", directory, FINGERPRINT_FILE)
        return
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    if not isinstance(saved, dict):
        raise CheckpointError(f"{file} holds a {type(saved).__name__} instead of an object")
    found = fingerprint.differences(saved.get("fingerprint", saved))
    decisive = [f"{difference.key}: {difference.text}" for difference in found if difference.decisive]
    others = [f"{difference.key}: {difference.text}" for difference in found if not difference.decisive]
    if others:
        logger.info("settings that differ from those of %s and may: %s", directory, "; ".join(others))
    if not decisive:
        return
    listed = "".join(f"\n  {text}" for text in decisive)
    if policy == "allow":
        logger.warning("%s was made under other settings, which now change:%s", directory, listed)
        return
    raise ConfigError(
        f"{directory} was made by a run with other settings or data (there -> now):{listed}\n"
        "Resume with the values of that run; start another run beside it with another trainer.experiment_name or "
        "trainer.default_local_dir; start again in its place with trainer.resume_mode=disable; or let the new values "
        "count from here with trainer.on_resume_mismatch=allow"
    )


_UNKNOWN = object()


def _default(key: Key) -> Any:
    """The value that a run of an earlier version had without knowing the key; unknown where it is taken over."""
    if key.kind == "free":
        return None
    return _UNKNOWN if isinstance(key.default, str) and key.default.startswith("${") else key.default


def _key_of(path: str, keys: Mapping[str, Key]) -> Key | None:
    """The key of a dotted path, which may lie below a key that takes any mapping."""
    if path in keys:
        return keys[path]
    while "." in path:
        path = path.rpartition(".")[0]
        if path in keys:
            return keys[path] if keys[path].kind == "free" else None
    return None


def _value(values: Mapping[str, Any], path: str) -> Any:
    node: Any = values
    for name in path.split("."):
        node = node[name]
    return node


def _leaves(value: Any, path: str) -> dict[str, Any]:
    if isinstance(value, Mapping):
        found: dict[str, Any] = {}
        for name, inner in value.items():
            found.update(_leaves(inner, f"{path}.{name}"))
        return found
    return {path: value}


def _change(name: str, old: str | None, new: str | None) -> str:
    if name == "rows":
        return f"the rows have changed ({old} -> {new})"
    if old is None:
        return f"{name} is new"
    return f"{name} is not there any more" if new is None else f"the content of {name} has changed"
