"""Make click options from config dataclasses, and a config from what was typed.

Defaults stay in the dataclass: an option that is not typed is not passed on.
"""

import tomllib
import types
from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import click

from dflash_cache.config import flag
from dflash_cache.errors import ConfigError

Config = TypeVar("Config")
Command = Callable[..., Any]


class IntList(click.ParamType[tuple[int, ...]]):
    """Whole numbers with commas between them."""

    name = "n,n,..."

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, ...]:
        if isinstance(value, list):
            if all(type(item) is int for item in value):
                return tuple(value)
            self.fail(f"{value!r}: want whole numbers", param, ctx)
        try:
            return tuple(int(item) for item in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r}: want whole numbers with commas between them", param, ctx)


class NameList(click.ParamType[tuple[str, ...]]):
    """Names with commas between them."""

    name = "name,name,..."

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[str, ...]:
        if isinstance(value, (list, tuple)):
            if all(type(item) is str for item in value):
                return tuple(value)
            self.fail(f"{value!r}: want names", param, ctx)
        names = tuple(name.strip() for name in str(value).split(","))
        if not all(names):
            self.fail(f"{value!r}: want names with commas between them", param, ctx)
        return names


class IntOrAuto(click.ParamType[int | str]):
    """A whole number, or the word auto."""

    name = "n|auto"

    def convert(self, value: Any, param: Any, ctx: Any) -> int | str:
        if value == "auto" or type(value) is int:
            return value  # type: ignore[no-any-return]
        try:
            return int(value)
        except ValueError:
            self.fail(f"{value!r}: want a whole number, or auto", param, ctx)


INT_OR_AUTO = int | Literal["auto"]

CLICK_TYPES: dict[Any, Any] = {
    bool: click.BOOL,
    int: click.INT,
    float: click.FLOAT,
    str: click.STRING,
    Path: click.Path(path_type=Path),
    tuple[int, ...]: IntList(),
    tuple[str, ...]: NameList(),
    INT_OR_AUTO: IntOrAuto(),
}


# click converts what people type; a TOML value has its type already and must have the right one.
TOML_TYPES: dict[Any, tuple[type, ...]] = {
    bool: (bool,),
    int: (int,),
    float: (float, int),
    str: (str,),
    Path: (str,),
    tuple[int, ...]: (list, str),
    tuple[str, ...]: (list, str),
    INT_OR_AUTO: (int, str),
}


def config_options(
    config_class: type, *, skip: tuple[str, ...] = ()
) -> Callable[[Command], Command]:
    """Decorator: one option per field of a config dataclass, and `--config FILE`.

    Fields in `skip` are arguments of the command instead.
    """
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
        return click.option(
            "--config",
            "config_file",
            type=click.Path(path_type=Path),
            default=None,
            help="TOML file with any of these options; what is typed wins.",
        )(command)

    return decorate


def switch(name: str) -> str:
    """Two spellings, so that a file that turns something on can be overruled."""
    return f"{flag(name)}/{flag('no_' + name)}"


def plain_type(hint: Any) -> Any:
    """`int | None` is an int that may be left out."""
    if hint in CLICK_TYPES:
        return hint
    if get_origin(hint) in (Union, types.UnionType):
        return next(arg for arg in get_args(hint) if arg is not type(None))
    return hint


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
    typed = dict(typed)
    values = _from_file(config_class, typed.pop("config_file"))
    values.update({name: value for name, value in typed.items() if value is not None})
    for field in fields(config_class):  # type: ignore[arg-type]
        if field.default is MISSING and field.name not in values:
            raise click.UsageError(f"Missing option '{flag(field.name)}'.")
    return config_class(**values)


def _from_file(config_class: type, path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not TOML ({error})") from None
    hints = get_type_hints(config_class)
    known = {field.name for field in fields(config_class)}
    values = {}
    for key, value in found.items():
        name = key.replace("-", "_")
        name = f"{name}_" if f"{name}_" in known else name
        if name not in known:
            raise ConfigError(f"{path}: unknown option {key!r}; known are {sorted(known)}")
        wanted = plain_type(hints[name])
        if type(value) not in TOML_TYPES[wanted]:
            names = " or ".join(kind.__name__ for kind in TOML_TYPES[wanted])
            raise ConfigError(f"{path}, {key}: found {value!r}, want {names}")
        try:
            values[name] = CLICK_TYPES[wanted].convert(value, None, None)
        except click.UsageError as error:
            raise ConfigError(f"{path}, {key}: {error.format_message()}") from None
    return values
