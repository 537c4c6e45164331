"""What people see: tables on stdout, one JSON object with --json, errors as one message."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import click

from dflash_cache.errors import DFlashError, ToldElsewhere

json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print exactly one JSON object on stdout."
)


class ErrorBorder(click.Group):
    """A user's mistake is one message and exit 1; a bug of ours keeps its traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ToldElsewhere:
            ctx.exit(1)
        except DFlashError as error:
            raise click.ClickException(str(error)) from None
        except (PermissionError, NotADirectoryError, IsADirectoryError) as error:
            where = error.filename or "a file"
            raise click.ClickException(
                f"{where}: {error.strerror}; give a path that can be read and written"
            ) from None


def show(values: Mapping[str, Any], *, as_json: bool) -> None:
    """Print a report for machines or for people."""
    if as_json:
        click.echo(json.dumps(dict(values)))
        return
    width = max((len(key) for key in values), default=0)
    for key, value in values.items():
        click.echo(f"{key:<{width}}  {spoken(key, value)}")


def spoken(key: str, value: Any) -> str:
    """A value as people read it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and (key == "bytes" or key.endswith("_bytes")):
        return f"{value / 1e9:.3f} GB"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{k}: {spoken(k, v)}" for k, v in value.items()) or "-"
    if isinstance(value, list):
        return " ".join(spoken("", item) for item in value) or "-"
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def aligned(lines: Sequence[Sequence[str]], *, right: bool = True) -> str:
    """Columns of equal width, the first to the left and the others to the `right` or left too."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if right and place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
