"""The command line of an entry point: ``key=value`` overrides and the few flags of Hydra that make sense here."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from omegaconf import OmegaConf

from verl.config.base import Config, to_dict
from verl.config.load import load_config
from verl.config.schema import keys_of
from verl.errors import ConfigError, OutputError
from verl.utils.output import guard_streams, write_result

R = TypeVar("R", bound=Config)

# Flag -> name of the option; each takes a value.
_VALUE_FLAGS = {
    "--config-path": "config_path",
    "-cp": "config_path",
    "--config-name": "config_name",
    "-cn": "config_name",
    "--config-dir": "config_dir",
    "-cd": "config_dir",
    "--cfg": "cfg",
    "-c": "cfg",
    "--package": "package",
    "-p": "package",
}
_FLAGS = {"--resolve": "resolve", "--help": "help", "-h": "help"}
_NOT_HERE = {
    "--multirun": "starting several runs from one command is not supported; start them one by one",
    "-m": "starting several runs from one command is not supported; start them one by one",
    "--run": "is the only mode, so leave it out",
    "--info": "use --cfg job to see the configuration",
    "--hydra-help": "use --help",
    "--shell-completion": "is not supported",
}


@dataclass
class Arguments:
    """A parsed command line."""

    overrides: list[str] = field(default_factory=list)
    options: dict[str, str] = field(default_factory=dict)
    flags: set[str] = field(default_factory=set)


def split_argv(argv: Sequence[str]) -> Arguments:
    """Split a command line into overrides and flags.

    Raises:
        ConfigError: an unknown flag, or a flag without its value.
    """
    arguments, rest = Arguments(), list(argv)
    while rest:
        word = rest.pop(0)
        name, _, value = word.partition("=") if word.startswith("-") else (word, "", "")
        if name in _VALUE_FLAGS:
            if "=" not in word and not rest:
                raise ConfigError(f"{name}: needs a value, for example {name}=...")
            arguments.options[_VALUE_FLAGS[name]] = value if "=" in word else rest.pop(0)
        elif word in _FLAGS:
            arguments.flags.add(_FLAGS[word])
        elif word.startswith("-"):
            why = _NOT_HERE.get(name, "unknown flag; settings are given as key=value")
            raise ConfigError(f"{word}: {why} (flags: {', '.join([*_VALUE_FLAGS, *_FLAGS])})")
        else:
            arguments.overrides.append(word)
    return arguments


def parse_cli(schema: type[R], config_name: str, argv: Sequence[str] | None = None) -> R:
    """Return the configuration of a command line.

    With ``--help`` or ``--cfg job`` print and exit with code 0; a wrong configuration is printed to stderr as one
    message without a traceback, and the process exits with code 2.

    Args:
        schema: the root dataclass.
        config_name: the preset when ``--config-name`` is not given.
        argv: words of the command line; ``None`` = ``sys.argv[1:]``.
    """
    guard_streams()
    try:
        arguments = split_argv(sys.argv[1:] if argv is None else argv)
        if "help" in arguments.flags:
            write_result(help_text(schema, config_name) + "\n")
            sys.exit(0)
        options = arguments.options
        if options.get("cfg", "job") not in ("job", "all"):
            raise ConfigError(f"--cfg={options['cfg']}: expected job; there is no other configuration to show")
        config = load_config(
            schema,
            options.get("config_name", config_name),
            arguments.overrides,
            options.get("config_path"),
            config_dir=options.get("config_dir"),
        )
        if "cfg" in options:
            write_result(_yaml_of(config, options.get("package")))
            sys.exit(0)
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)
    except OutputError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(1)
    return config


def main(schema: type[R], config_name: str) -> Callable[[Callable[[R], Any]], Callable[[], Any]]:
    """Decorate an entry point ``def run(config)``: calling it without arguments reads the command line.

    A ``ConfigError`` that the entry point raises (a missing file, an unknown plug-in) ends like one of the command
    line: one message on stderr, exit code 2.
    """

    def decorate(run: Callable[[R], Any]) -> Callable[[], Any]:
        @functools.wraps(run)
        def entry() -> Any:
            config = parse_cli(schema, config_name)
            try:
                return run(config)
            except ConfigError as error:
                sys.stderr.write(f"error: {error}\n")
                sys.exit(2)

        return entry

    return decorate


def help_text(schema: type[Config], config_name: str) -> str:
    """Return what ``--help`` prints: usage, an example, and every key with its default and its help."""
    example = getattr(schema, "EXAMPLE", "")  # begins with the command
    lines = [
        f"{(schema.__doc__ or '').strip().splitlines()[0]}",
        "",
        f"usage: {' '.join([*example.split()[:2], 'key=value'])} ... [--config-path DIR] [--config-name NAME] "
        "[--config-dir DIR]",
        f"       (NAME defaults to {config_name}; --cfg job prints the whole configuration as YAML; "
        "--package SECTION only that section)",
        "",
        *(["example:", f"  {example}", ""] if example else []),
        "keys and defaults:",
    ]
    for key in keys_of(schema).values():
        if key.kind == "section":
            lines.append(f"\n{key.path}: {key.metadata['help']}")
        else:
            default = "null" if key.default is None else key.default
            choices = key.metadata.get("choices")
            extra = f" [{', '.join(choices)}]" if choices else ""
            lines.append(f"  {key.path}={default}\n      {key.metadata['help']}{extra}")
    return "\n".join(lines)


def _yaml_of(config: Config, package: str | None) -> str:
    values: Any = to_dict(config)
    if package is None or package in ("_global_", ""):
        return OmegaConf.to_yaml(OmegaConf.create(values))
    for name in package.split("."):
        if not isinstance(values, dict) or name not in values:
            raise ConfigError(f"--package={package}: there is no such section")
        values = values[name]
    if not isinstance(values, dict | list):
        return f"{values}\n"
    return f"# @package {package}\n" + OmegaConf.to_yaml(OmegaConf.create(values))
