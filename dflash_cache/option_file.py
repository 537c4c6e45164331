"""Options that a TOML file gives, checked against the fields of a config dataclass.

People type options as text, a file gives values that have their types already: those are not
converted, but must be right.
"""

import tomllib
import types
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from dflash_cache.errors import ConfigError

INT_OR_AUTO = int | Literal["auto"]

# What a value may be in a file.
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


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a file."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not TOML ({error})") from None


def options_of(config_class: type, table: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    """Values by field, in the order of the table; keys may have hyphens, as options do."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        name = field_of(config_class, key, where=where)
        if name in found:
            raise ConfigError(f"{where}: {key!r} is there twice; drop one")
        found[name] = value_of(config_class, name, value, where=f"{where}, {key}")
    return found


def field_of(config_class: type, key: str, *, where: str) -> str:
    """The field that a key of a file means."""
    known = {field.name for field in fields(config_class)}
    name = key.replace("-", "_")
    name = f"{name}_" if f"{name}_" in known else name
    if name not in known:
        raise ConfigError(f"{where}: unknown option {key!r}; known are {sorted(known)}")
    return name


def value_of(config_class: type, name: str, value: Any, *, where: str) -> Any:
    """The value of a file for a field, as the dataclass wants it."""
    wanted = plain_type(get_type_hints(config_class)[name])
    if type(value) not in TOML_TYPES[wanted]:
        names = " or ".join(kind.__name__ for kind in TOML_TYPES[wanted])
        raise ConfigError(f"{where}: found {value!r}, want {names}")
    try:
        return PARSERS[wanted](value) if wanted in PARSERS else wanted(value)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None


def plain_type(hint: Any) -> Any:
    """`int | None` is an int that may be left out."""
    if hint in TOML_TYPES:
        return hint
    if get_origin(hint) in (Union, types.UnionType):
        return next(arg for arg in get_args(hint) if arg is not type(None))
    return hint


# --- values, of files or typed; `ValueError` says what is wrong -----------------------------------


def whole_numbers(value: Any) -> tuple[int, ...]:
    """A list of them, or text with commas between them."""
    if isinstance(value, list):
        if all(type(item) is int for item in value):
            return tuple(value)
        raise ValueError(f"{value!r}: want whole numbers")
    try:
        return tuple(int(item) for item in str(value).split(","))
    except ValueError:
        raise ValueError(f"{value!r}: want whole numbers with commas between them") from None


def names(value: Any) -> tuple[str, ...]:
    """A list of them, or text with commas between them."""
    if isinstance(value, (list, tuple)):
        if all(type(item) is str for item in value):
            return tuple(value)
        raise ValueError(f"{value!r}: want names")
    found = tuple(name.strip() for name in str(value).split(","))
    if not all(found):
        raise ValueError(f"{value!r}: want names with commas between them")
    return found


def int_or_auto(value: Any) -> int | str:
    if value == "auto" or type(value) is int:
        return value  # type: ignore[no-any-return]
    try:
        return int(value)
    except ValueError:
        raise ValueError(f"{value!r}: want a whole number, or auto") from None


PARSERS: dict[Any, Any] = {
    tuple[int, ...]: whole_numbers,
    tuple[str, ...]: names,
    INT_OR_AUTO: int_or_auto,
}
