"""`dflash`: the commands.  Each says what it takes, calls one stage, prints one report.

Stages are imported inside the commands: `dflash --help` must not wait for torch.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import click

from dflash_cache import __version__
from dflash_cache.config import (
    ENCODING_NAMES,
    AnswersConfig,
    BuildConfig,
    InspectConfig,
    InspectDataConfig,
    flag,
)
from dflash_cache.errors import DFlashError
from dflash_cache.ranks import find_rank
from dflash_fit.config import EvalConfig, ExportConfig, FitConfig, ReportConfig
from dflash_fit.sweep_plan import SweepConfig, plan_sweep

from .eval_tables import decoding_tables
from .options import config_options, field_options, given_options, make_config
from .output import ErrorBorder, json_option, show
from .sweep_table import foresight, sweep_table


@click.group(cls=ErrorBorder, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="dflash")
def main() -> None:
    """Train DFlash drafters from a cache of the target's hidden states."""


@main.group()
def cache() -> None:
    """Build and look at caches of hidden states."""


@cache.command("build")
@config_options(BuildConfig)
@click.option("--dry-run", is_flag=True, help="Print the plan and write nothing.")
@json_option
def cache_build(dry_run: bool, as_json: bool, **typed: Any) -> None:
    """Run the target over a data set and keep its hidden states.

    The same command again continues where it stopped, or says that the cache is complete.
    """
    config = make_config(BuildConfig, typed)
    from dflash_cache import build, describe, plan

    quiet_libraries()
    if dry_run:
        show(describe.describe_plan(plan.plan_only(config)), as_json=as_json)
        return
    build.build_cache(config)
    if (rank := find_rank(os.environ)) is None or rank.first:
        show(describe.describe_cache(config.out), as_json=as_json)


@cache.command("info")
@click.argument("cache")
@json_option
def cache_info(cache: str, as_json: bool) -> None:
    """Say what a cache holds, and whether it is complete."""
    from dflash_cache import describe

    show(describe.describe_cache(cache), as_json=as_json)


@cache.command("verify")
@click.argument("cache")
@json_option
@click.pass_context
def cache_verify(context: click.Context, cache: str, as_json: bool) -> None:
    """Read every byte of a cache and say what is damaged; exit code 1 if anything is."""
    from dflash_cache import verify

    found = verify.verify_cache(cache)
    show(found, as_json=as_json)
    if not found["ok"]:
        context.exit(1)


@cache.command("repair")
@click.argument("cache", type=click.Path(path_type=Path))
@click.option("--target", default=None, help="Where the target is now, if it was moved.")
@click.option("--data", default=None, help="Where the data is now, if it was moved.")
@click.option("--device", default="auto", help="cpu, cuda, cuda:1 ...; auto takes a GPU.")
@json_option
def cache_repair(
    cache: Path, target: str | None, data: str | None, device: str, as_json: bool
) -> None:
    """Extract again what a cache has lost, and only that."""
    from dflash_cache import repair

    quiet_libraries()
    found = repair.repair_cache(cache, target=target, data=data, device=device)
    show(found, as_json=as_json)


@cache.command("gc")
@click.argument("cache", type=click.Path(path_type=Path))
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
@json_option
def cache_gc(cache: Path, dry_run: bool, as_json: bool) -> None:
    """Remove what killed builds left behind: attempts that no record names."""
    from dflash_cache import sweep

    show(sweep.collect(cache, dry_run=dry_run), as_json=as_json)


@cache.command("convert")
@click.argument("cache")
@click.option("--encoding", required=True, help=f"One of {', '.join(ENCODING_NAMES)}.")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="The new cache.")
@click.option("--device", default="auto", help="Where states are encoded: cpu, cuda ...")
@json_option
def cache_convert(cache: str, encoding: str, out: Path, device: str, as_json: bool) -> None:
    """Write a cache in another encoding, without the target."""
    from dflash_cache import convert, describe

    convert.convert_cache(cache, encoding=encoding, out=out, device=device)
    show(describe.describe_cache(out), as_json=as_json)


@cache.command("inspect")
@click.argument("cache", required=False)
@config_options(InspectDataConfig)
@json_option
def cache_inspect(cache: str | None, as_json: bool, **typed: Any) -> None:
    """Show samples of a CACHE, or rows before they are built (--data, --target), token by token.

    Supervised text is coloured; --html writes a page.
    """
    from dflash_cache import inspect

    quiet_libraries()
    if cache is None:
        if typed["data"] is None and typed["config_file"] is None:
            raise click.UsageError("Give a CACHE, or rows by --data and --target.")
        found = inspect.inspect_data(make_config(InspectDataConfig, typed))
    else:
        known = {field.name for field in fields(InspectConfig)} | {"config_file"}
        given = {name for name, value in typed.items() if value is not None}
        for name in sorted(given - known):
            raise click.UsageError(f"{flag(name)}: not with a cache, which has its rows.")
        typed = {name: value for name, value in typed.items() if name in known}
        found = inspect.inspect_cache(make_config(InspectConfig, {**typed, "cache": cache}))
    if as_json:
        show(found.to_dict(), as_json=True)
    else:
        click.echo(found.text() if found.html is None else f"page  {found.html}")


@cache.command("answers")
@config_options(AnswersConfig)
@json_option
def cache_answers(as_json: bool, **typed: Any) -> None:
    """Let the target itself write the assistant turns, through an OpenAI-compatible server.

    What comes out feeds `dflash cache build`.  The same command again asks for what is missing.
    """
    config = make_config(AnswersConfig, typed)
    from dflash_cache import answers

    show(answers.write_answers(config), as_json=as_json)


@contextmanager
def ending_ranks(*, alone: bool) -> Iterator[None]:
    """A mistake in the options of one of many ranks ends the others, which would wait for it."""
    try:
        yield
    except (click.UsageError, DFlashError):
        rank = None
        with suppress(DFlashError):  # a launcher that says too little is no reason to say less
            rank = None if alone else find_rank(os.environ)
        if rank is None:
            raise
        from dflash_fit.launch import joining

        with joining(rank):
            raise


class RankCommand(click.Command):
    """A command that may be started on many machines, with words of its own on each."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> click.Context:
        with ending_ranks(alone="--dry-run" in args or "--sweep" in args):
            return super().make_context(info_name, args, parent, **extra)


@main.command("fit", cls=RankCommand)
@config_options(FitConfig)
@field_options(SweepConfig)
@click.option("--dry-run", is_flag=True, help="Say what the run takes and write nothing.")
@json_option
@click.pass_context
def fit(context: click.Context, /, dry_run: bool, as_json: bool, **typed: Any) -> None:
    """Train a drafter from a cache, or with --sweep several of them from one read of it.

    The same command again resumes exactly.
    """
    several = SweepConfig(**{field.name: typed.pop(field.name) for field in fields(SweepConfig)})
    if several.sweep is not None:
        fit_sweep(context, several, typed, dry_run=dry_run, as_json=as_json)
        return
    with ending_ranks(alone=dry_run):
        config = make_config(FitConfig, typed)
    from dflash_fit import estimate, loop

    text = None
    if dry_run:
        found = loop.dry_run(config)
        report, text = found.to_dict(), estimate.tell(found)
    else:
        report = loop.fit(config)
    if (rank := find_rank(os.environ)) is not None and not rank.first:
        return
    if text is None or as_json:
        show(report, as_json=as_json)
    else:
        click.echo(text)


def fit_sweep(
    context: click.Context,
    config: SweepConfig,
    typed: dict[str, Any],
    *,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Exit code 1 if a trial failed, after the table of all."""
    in_file, on_line = given_options(FitConfig, typed)
    plan = plan_sweep(config, in_file=in_file, typed=on_line)
    from dflash_fit import sweep

    report = sweep.look(plan) if dry_run else sweep.sweep(plan)
    if as_json:
        show(report, as_json=True)
    else:
        click.echo(foresight(report) if dry_run else sweep_table(report))
    if report["failed"]:
        context.exit(1)


@main.command("eval")
@config_options(EvalConfig)
@json_option
def evaluate(as_json: bool, **typed: Any) -> None:
    """Measure a drafter: offline from a cache, or by real decoding with the target."""
    config = make_config(EvalConfig, typed)
    from dflash_fit import evaluate as evaluation

    quiet_libraries()
    report = evaluation.evaluate_drafter(config)
    if as_json or report["kind"] == "offline":
        show(report, as_json=as_json)
    else:
        click.echo(decoding_tables(report))


@main.command("export")
@click.argument("run", type=click.Path(path_type=Path))
@config_options(ExportConfig, skip=("run",))
@json_option
def export(as_json: bool, **typed: Any) -> None:
    """Write a trained drafter as a folder that SGLang, vLLM and transformers load.

    RUN is a run, one of its checkpoints, or a published drafter folder of any format.
    """
    config = make_config(ExportConfig, typed)
    from dflash_fit import export as exporting

    show(exporting.export(config), as_json=as_json)


@main.command("report")
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path))
@config_options(ReportConfig, skip=("runs",))
@json_option
def report(as_json: bool, **typed: Any) -> None:
    """Write a page about runs: curves, acceptance by slot, roofline, options, sweep table.

    RUNS are run folders, or folders that hold some, such as a sweep's.
    """
    config = make_config(ReportConfig, typed)
    from dflash_fit import report as reporting

    show(reporting.write_report(config), as_json=as_json)


def quiet_libraries() -> None:
    """Keep the progress bars and warnings of transformers and datasets off our output."""
    import logging

    import transformers

    # Not by importing `datasets`, which takes seconds and is seldom needed.
    logging.getLogger("datasets").setLevel(logging.CRITICAL)
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
