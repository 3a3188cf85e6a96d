"""From presets, YAML files and ``key=value`` overrides to one checked, sealed configuration.

Hydra finds and composes the YAML files and parses the overrides; OmegaConf resolves interpolations. Keys and types are
checked here against the dataclasses instead of by structured nodes, because those stop at the first mistake, accept any
key with a ``+`` and know no other spellings, while a user wants all mistakes at once, in one list.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeVar

from hydra import compose, initialize_config_dir
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, QuotedString
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from verl.config.base import Config, find_problems, seal
from verl.config.coerce import coerce
from verl.config.keys import find_unsupported, is_off, resolve_alias, switch_of
from verl.config.schema import Key, keys_of, nearest
from verl.errors import ConfigError
from verl.utils.logging import HIDDEN

logger = logging.getLogger(__name__)

R = TypeVar("R", bound=Config)
PRESETS = Path(__file__).resolve().parent.parent / "trainer" / "config"
TITLE = "the configuration has problems"

Values = dict[str, Any]  # dotted path of our key -> value; paths go below the key for dicts with any keys


_extra_dir: ContextVar[Path | None] = ContextVar("_extra_dir", default=None)


class PresetSearchPath(SearchPathPlugin):
    """Makes the presets (``defaults: [ppo_trainer]``) known to YAML files in other directories."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append ``--config-dir``, if there is one, and the directory of presets."""
        if (extra := _extra_dir.get()) is not None:
            search_path.append(provider="command-line", path=f"file://{extra}")
        search_path.append(provider="verl", path=f"file://{PRESETS}")


def load_config(
    schema: type[R],
    config_name: str | None = None,
    overrides: Sequence[str] = (),
    config_path: str | None = None,
    *,
    config_dir: str | None = None,
) -> R:
    """Compose, check and seal a configuration.

    Args:
        schema: the root dataclass, for example ``PPOConfig``.
        config_name: YAML file to start from, a preset or one in ``config_path``; ``None`` = defaults only.
        overrides: command-line overrides in Hydra's syntax.
        config_path: directory with the user's YAML files; relative ones are looked up in the working directory, then
            beside the entry points (as Hydra does).
        config_dir: one more directory to find YAML files in.

    Returns:
        The sealed configuration.

    Raises:
        ConfigError: with all problems: unknown and unsupported keys, types, choices, bounds, combinations.
    """
    problems: list[str] = []
    keys = keys_of(schema)
    parsed = _parse(overrides, problems)
    try:
        composed, plain = _compose(config_name, config_path, config_dir, parsed)
    except (HydraException, OmegaConfBaseException, YAMLError, OSError) as error:
        raise ConfigError(f"{TITLE}:\n" + "\n".join(f"  {p}" for p in [*problems, _short(error)])) from None
    values = _canonical(schema, _leaves(composed), problems)
    _apply(schema, plain, values, problems)
    problems.extend(_hidden_values(values))
    accepted = _known(schema, values, problems)
    config = _build(schema, accepted, keys, problems)
    derive = getattr(config, "derive", None)
    if derive is not None:
        problems.extend(derive())
    problems.extend(_new_problems(config, keys, accepted, problems))
    if problems:
        raise ConfigError(f"{TITLE}:\n" + "\n".join(f"  {p}" for p in dict.fromkeys(problems)))
    return seal(config)


def _hidden_values(values: Values) -> Iterator[str]:
    """Yield the values that the record of a run has hidden, so that a rerun from it does not use them as they are."""
    for path, value in values.items():
        texts = value if isinstance(value, list) else [value]
        if any(text == HIDDEN or (isinstance(text, str) and f"://{HIDDEN}@" in text) for text in texts):
            yield f"{path}={value!r}: is a secret that the record of a run hides; give its value on the command line"


def _new_problems(config: Config, keys: Mapping[str, Key], accepted: Values, problems: Sequence[str]) -> Iterator[str]:
    """Yield the problems of values, except those that only follow from one that is reported already."""
    reported = {p.split("=", 1)[0] for p in problems}
    own: set[str] = set()  # a key may have several problems of its own
    for problem in find_problems(config):
        path = problem.split("=", 1)[0]
        source = None if path in reported else _source(path, keys, accepted)
        while source is not None and source not in reported | own:
            source = _source(source, keys, accepted)
        if source is None and path not in reported:
            yield problem
            own.add(path)


def _source(path: str, keys: Mapping[str, Key], accepted: Values) -> str | None:
    """Return the key that ``path`` takes its value from, if it was not given itself."""
    key = keys.get(path)
    if key is None or path in accepted or not str(key.default).startswith("${"):
        return None
    return str(key.default)[2:-1]


def _parse(overrides: Sequence[str], problems: list[str]) -> list[Override]:
    parser = OverridesParser.create()
    parsed: list[Override] = []
    for text in overrides:
        try:
            override = parser.parse_override(text)
        except HydraException as error:
            why = str(error).splitlines()[0]
            problems.append(
                f"{text}: not of the form key=value ({why}); quote values with special characters, as in 'key=\"a b\"'"
            )
            continue
        if override.is_sweep_override():
            problems.append(f"{text}: one run takes one value; write a list as {override.key_or_group}=[a,b]")
            continue
        parsed.append(override)
    return parsed


def find_config_dir(config_path: str | None) -> Path:
    """Return the directory of the YAML files.

    Raises:
        ConfigError: there is no such directory.
    """
    if config_path is None:
        return PRESETS
    given = Path(config_path.removeprefix("file://")).expanduser()
    candidates = [given] if given.is_absolute() else [Path.cwd() / given, PRESETS.parent / given]
    for candidate in candidates:
        if candidate.is_dir():
            return candidate.resolve()
    raise ConfigError(f"--config-path={config_path}: no such directory (looked at {', '.join(map(str, candidates))})")


def _compose(
    config_name: str | None,
    config_path: str | None,
    config_dir: str | None,
    parsed: Sequence[Override],
) -> tuple[DictConfig, list[Override]]:
    """Return the composed YAML files and the overrides of values, which are still to be applied."""
    directory = find_config_dir(config_path)
    _extra_dir.set(find_config_dir(config_dir) if config_dir is not None else None)
    Plugins.instance().register(PresetSearchPath)
    with initialize_config_dir(version_base="1.3", config_dir=str(directory)):
        loader = GlobalHydra.instance().config_loader()
        groups: list[Override] = []
        plain: list[Override] = []
        for override in parsed:
            key = override.key_or_group
            is_group = "/" in key or "@" in key or key.startswith("hydra.") or bool(loader.get_group_options(key))
            (groups if is_group else plain).append(override)
        if config_name is None:
            return OmegaConf.create({}), plain
        name = config_name.removesuffix(".yaml").removesuffix(".yml")
        composed = compose(name, overrides=[str(o.input_line) for o in groups])
    OmegaConf.set_struct(composed, False)
    return composed, plain


def _leaves(node: DictConfig) -> list[tuple[str, Any]]:
    """Return (dotted path, value) of every leaf; interpolations stay text, an empty dict is a leaf."""
    return list(_flatten(OmegaConf.to_container(node, resolve=False), ""))


def _flatten(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and (value or not path):
        for name, inner in value.items():
            yield from _flatten(inner, f"{path}.{name}" if path else str(name))
    else:
        yield path, value


def _canonical(schema: type[Config], leaves: Sequence[tuple[str, Any]], problems: list[str]) -> Values:
    """Map other spellings to our keys; two spellings of one key with different values are a problem."""
    values: Values = {}
    spelled: dict[str, str] = {}
    for path, value in leaves:
        ours = resolve_alias(schema.__name__, path)
        if ours != path:
            _log_alias(path, ours)
        if ours in values and spelled[ours] != path and values[ours] != value:
            problems.append(
                f"{path}={value!r}: is the same key as {spelled[ours]}={values[ours]!r}; give one of them "
                f"({ours} is the name here)"
            )
            continue
        values[ours] = _rename_references(schema, value)
        spelled[ours] = path
    return values


_logged: set[str] = set()


def _log_alias(path: str, ours: str) -> None:
    if path not in _logged:
        _logged.add(path)
        logger.info("configuration key %s is read as %s", path, ours)


def _rename_references(schema: type[Config], value: Any) -> Any:
    """Let interpolations use other spellings too."""
    if isinstance(value, str) and "${" in value:
        return re.sub(r"\$\{([A-Za-z_][\w.]*)\}", lambda m: f"${{{resolve_alias(schema.__name__, m[1])}}}", value)
    if isinstance(value, list):
        return [_rename_references(schema, v) for v in value]
    return value


def _apply(schema: type[Config], overrides: Sequence[Override], values: Values, problems: list[str]) -> None:
    """Apply the overrides of values, in order, on top of the YAML files' values."""
    given: list[tuple[str, Any]] = []
    for override in overrides:
        key = override.key_or_group
        ours = resolve_alias(schema.__name__, key)
        if not override.is_delete():
            given.extend(_flatten(_plain(override.value()), key))
            continue
        before = {**values, **{resolve_alias(schema.__name__, k): v for k, v in given}}
        wanted = override.value()
        if wanted is not None and before.get(ours) != wanted:
            problems.append(f"~{key}={wanted!r}: the value to delete is {before.get(ours)!r}")
        if ours not in keys_of(schema) and not any(_within(k, ours) for k in before):
            problems.append(f"~{key}: there is no such key to delete{_hint(schema, key)}")
        given = [(k, v) for k, v in given if not _within(resolve_alias(schema.__name__, k), ours)]
        for k in [k for k in values if _within(k, ours)]:
            del values[k]
    last: dict[str, Any] = {}
    for path, value in given:
        if value == {} and any(_within(k, path) for k in last):
            continue  # merging an empty dict changes nothing
        for k in [k for k in last if _within(path, k) or _within(k, path)]:
            if k == path or not _refers_to_section(k, last[k], schema):
                del last[k]  # a value replaces a dict of values and the other way round
        last[path] = value
    for path, value in _canonical(schema, list(last.items()), problems).items():
        if value == {} and any(_within(k, path) for k in values):
            continue
        for k in [k for k in values if _within(k, path) or _within(path, k)]:
            if not _refers_to_section(k, values[k], schema):
                del values[k]
        values[path] = value


def _within(path: str, parent: str) -> bool:
    return path == parent or path.startswith(parent + ".")


def _refers_to_section(path: str, value: Any, schema: type[Config]) -> bool:
    """Return whether a section is set to an interpolation; keys below it may still be given on top."""
    key = keys_of(schema).get(path)
    return key is not None and key.kind == "section" and isinstance(value, str) and value.startswith("${")


def _plain(value: Any) -> Any:
    """Return an override's value without Hydra's own types."""
    if isinstance(value, QuotedString):
        return value.text
    if isinstance(value, Mapping):
        return {str(_plain(k)): _plain(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_plain(v) for v in value]
    return value


def _known(schema: type[Config], values: Values, problems: list[str]) -> Values:
    """Return the values of known keys; report the others."""
    keys = keys_of(schema)
    accepted: Values = {}
    refused: dict[str, list[str]] = {}
    for path, value in values.items():
        if path in keys:
            if keys[path].kind == "section" and value != {} and not _refers_to_section(path, value, schema):
                problems.append(
                    f"{path}={value!r}: is a section; set its keys, for example {_first_key(path, keys)}=..."
                )
            else:
                accepted[path] = value
        elif _free_parent(path, keys) is not None:
            accepted[path] = value
        elif (entry := find_unsupported(path)) is not None:
            switch = switch_of(entry, path)
            if not entry.accepts(value) and not (switch in values and is_off(str(switch), values[switch])):
                refused.setdefault(entry.reason, []).append(f"{path}={value!r}")
        else:
            problems.append(f"{path}={value!r}: unknown key{_hint(schema, path)}")
    problems.extend(f"{', '.join(which)}: {reason}" for reason, which in refused.items())
    return accepted


def _first_key(path: str, keys: Mapping[str, Key]) -> str:
    return next(p for p, key in keys.items() if p.startswith(path + ".") and key.kind != "section")


def _free_parent(path: str, keys: Mapping[str, Key]) -> str | None:
    while "." in path:
        path = path.rsplit(".", 1)[0]
        if path in keys:
            return path if keys[path].kind == "free" else None
    return None


def _hint(schema: type[Config], path: str) -> str:
    near = nearest(path, keys_of(schema))
    return f"; did you mean {' or '.join(near)}?" if near else ""


def _build(schema: type[R], accepted: Values, keys: Mapping[str, Key], problems: list[str]) -> R:
    """Overlay the values on the defaults, resolve interpolations and make the dataclasses."""
    tree: dict[str, Any] = {}
    for path, key in keys.items():
        _put(tree, path, {} if key.kind == "section" else copy.deepcopy(key.default))
    for path, value in accepted.items():
        if isinstance(value, str) and path in keys and keys[path].kind == "section":
            continue
        if value == {} and path in keys:
            continue
        _put(tree, path, value)
    for path, value in accepted.items():  # a section that is one interpolation: each of its keys follows
        if isinstance(value, str) and path in keys and keys[path].kind == "section":
            for p, key in keys.items():
                if p.startswith(path + ".") and key.kind != "section" and p not in accepted:
                    _put(tree, p, f"{value[:-1]}.{p[len(path) + 1 :]}}}")
    config = schema()
    node = OmegaConf.create({})
    try:
        node = OmegaConf.create(tree)
    except OmegaConfBaseException as error:
        problems.append(_short(error))
    mistyped: dict[str, str] = {}
    for path, key in keys.items():
        if key.kind == "section":
            continue
        raw = _get(tree, path)
        if raw == "???":
            problems.append(f"{path}='???': must be given")
            continue
        try:
            value = coerce(_resolve(node, path) if "${" in str(raw) else raw, key)
        except TypeError as error:
            mistyped[path] = f"{path}={raw!r}: {error}"
            continue
        except (OmegaConfBaseException, RecursionError) as error:
            problems.append(f"{path}={raw!r}: {_short(error)}")
            continue
        _set(config, path, value)
    # a key that takes its value from another one is not reported too
    problems.extend(said for path, said in mistyped.items() if _source(path, keys, accepted) not in mistyped)
    return config


def _resolve(node: DictConfig, path: str) -> Any:
    value = OmegaConf.select(node, path, throw_on_missing=True, throw_on_resolution_failure=True)
    if isinstance(value, DictConfig | ListConfig):
        return OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
    return value


def _put(tree: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = path.split(".")
    for name in parents:
        inner = tree.get(name)
        if not isinstance(inner, dict):
            inner = tree[name] = {}
        tree = inner
    tree[last] = copy.deepcopy(value)


def _get(tree: Mapping[str, Any], path: str) -> Any:
    value: Any = tree
    for name in path.split("."):
        value = value[name]
    return value


def _set(config: Config, path: str, value: Any) -> None:
    *parents, last = path.split(".")
    target: Any = config
    for name in parents:
        target = getattr(target, name)
    setattr(target, last, value)


def _short(error: BaseException) -> str:
    """Return the first line that says something, of the error or its cause."""
    if isinstance(error, RecursionError) or "Recursi" in str(error):
        return "the interpolation refers to itself"
    cause = error.__cause__ if isinstance(error, HydraException) and error.__cause__ is not None else error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    return " ".join(line for line in lines if not line.startswith(("full_key:", "object_type=")))[:600] or repr(cause)
