"""Make click options from config dataclasses, and a config from what was typed.

Defaults stay in the dataclass: an option that is not typed is not passed on.
"""

from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import click

from dflash_cache.config import flag
from dflash_cache.option_file import (
    INT_OR_AUTO,
    int_or_auto,
    names,
    options_of,
    plain_type,
    read_toml,
    whole_numbers,
)

Config = TypeVar("Config")
Command = Callable[..., Any]


class Parsed(click.ParamType[Any]):
    """What a function makes of the text; its `ValueError` says what is wrong."""

    def __init__(self, name: str, parse: Callable[[Any], Any]) -> None:
        self.name, self.parse = name, parse

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        try:
            return self.parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


CLICK_TYPES: dict[Any, Any] = {
    bool: click.BOOL,
    int: click.INT,
    float: click.FLOAT,
    str: click.STRING,
    Path: click.Path(path_type=Path),
    tuple[int, ...]: Parsed("n,n,...", whole_numbers),
    tuple[str, ...]: Parsed("name,name,...", names),
    INT_OR_AUTO: Parsed("n|auto", int_or_auto),
}


def config_options(
    config_class: type, *, skip: tuple[str, ...] = ()
) -> Callable[[Command], Command]:
    """Decorator: one option per field of a config dataclass, and `--config FILE`.

    Fields in `skip` are arguments of the command instead.
    """

    def decorate(command: Command) -> Command:
        return click.option(
            "--config",
            "config_file",
            type=click.Path(path_type=Path),
            default=None,
            help="TOML file with any of these options; what is typed wins.",
        )(field_options(config_class, skip=skip)(command))

    return decorate


def field_options(
    config_class: type, *, skip: tuple[str, ...] = ()
) -> Callable[[Command], Command]:
    """Decorator: one option per field of a config dataclass."""
    hints = get_type_hints(config_class)

    def decorate(command: Command) -> Command:
        for field in reversed(fields(config_class)):
            if field.name in skip:
                continue
            kind = plain_type(hints[field.name])
            command = click.option(
                switch(field.name) if kind is bool else flag(field.name),
                field.name,
                type=CLICK_TYPES[kind],
                default=None,
                help=described(field),
            )(command)
        return command

    return decorate


def switch(name: str) -> str:
    """Two spellings, so that a file that turns something on can be overruled."""
    return f"{flag(name)}/{flag('no_' + name)}"


def described(field: "Field[Any]") -> str:
    """Help text with the default behind it."""
    text = str(field.metadata["help"])
    if field.default is MISSING:
        return f"{text}  [required]"
    if field.default in (None, ()):
        return text
    shown = field.default
    if isinstance(shown, tuple):
        shown = ",".join(map(str, shown))
    return f"{text}  [default: {shown}]"


def make_config(config_class: type[Config], typed: dict[str, Any]) -> Config:
    """The config from typed options over `--config FILE` over the dataclass defaults."""
    in_file, on_line = given_options(config_class, typed)
    values = {**in_file, **on_line}
    for field in fields(config_class):  # type: ignore[arg-type]
        if field.default is MISSING and field.name not in values:
            raise click.UsageError(f"Missing option '{flag(field.name)}'.")
    return config_class(**values)


def given_options(
    config_class: type, typed: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What `--config FILE` gives, and what is typed."""
    path = typed["config_file"]
    in_file = {} if path is None else options_of(config_class, read_toml(path), where=str(path))
    named = {name: value for name, value in typed.items() if value is not None}
    named.pop("config_file", None)
    return in_file, named
