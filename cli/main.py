"""`dflash`: the commands.  Each says what it takes, calls one stage, prints one report.

Stages are imported inside the commands: `dflash --help` must not wait for torch.
"""

import os
from pathlib import Path
from typing import Any

import click

from dflash_cache import __version__
from dflash_cache.config import BuildConfig
from dflash_fit.config import EvalConfig, ExportConfig, FitConfig

from .options import config_options, make_config
from .output import ErrorBorder, json_option, show


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
    show(describe.describe_cache(config.out), as_json=as_json)


@cache.command("info")
@click.argument("folder", type=click.Path(path_type=Path))
@json_option
def cache_info(folder: Path, as_json: bool) -> None:
    """Say what a cache holds, and whether it is complete."""
    from dflash_cache import describe

    show(describe.describe_cache(folder), as_json=as_json)


@main.command("fit")
@config_options(FitConfig)
@json_option
def fit(as_json: bool, **typed: Any) -> None:
    """Train a drafter from a cache.  The same command again resumes exactly."""
    config = make_config(FitConfig, typed)
    from dflash_fit import loop

    show(loop.fit(config), as_json=as_json)


@main.command("eval")
@config_options(EvalConfig)
@json_option
def evaluate(as_json: bool, **typed: Any) -> None:
    """Measure a drafter: offline from a cache, or by real decoding with the target."""
    config = make_config(EvalConfig, typed)
    from dflash_fit import evaluate as evaluation

    quiet_libraries()
    show(evaluation.evaluate_drafter(config), as_json=as_json)


@main.command("export")
@click.argument("run", type=click.Path(path_type=Path))
@config_options(ExportConfig, skip=("run",))
@json_option
def export(as_json: bool, **typed: Any) -> None:
    """Write a trained drafter as a folder that SGLang and vLLM load."""
    config = make_config(ExportConfig, typed)
    from dflash_fit.checkpoint import find_drafter
    from dflash_fit.export import export_drafter

    source = find_drafter(config.run, checkpoint=config.checkpoint)
    show(export_drafter(source, config.out), as_json=as_json)


def quiet_libraries() -> None:
    """Keep the progress bars and warnings of transformers and datasets off our output."""
    import logging

    import transformers

    # Not by importing `datasets`, which takes seconds and is seldom needed.
    logging.getLogger("datasets").setLevel(logging.CRITICAL)
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
