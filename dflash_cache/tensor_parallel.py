"""Share the decoder layers of a target among processes, by transformers' own plan.

Embedding and head stay whole in every process, whatever the plan says: they are saved and looked
up rather than run, and to gather them would need all processes at the same line of the program.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed

from dflash_cache.errors import ConfigError, TargetError
from dflash_cache.survey import first_line


def shard_layers(model: Any, *, device: torch.device) -> None:
    """Make the decoder layers of an empty model this process's share of them.

    The whole `torch.distributed` world is one group.  Refuses families without a plan, and
    targets whose attention heads do not divide among the processes.
    """
    from transformers import DistributedConfig

    size, family = distributed.get_world_size(), type(model)
    plan = layer_plan(model)
    refuse_what_cannot_be_shared(model, plan, size, device)
    if size == 1:
        return
    try:
        model.tp_plan = plan
        with own_device(device):
            settings, _, mesh = family.prepare_distribute_model(DistributedConfig(tp_size=size))
            family.maybe_distribute_model(model, settings, mesh)
    except Exception as error:  # transformers and torch raise many kinds
        raise TargetError(
            f"{family.__name__}: cannot be shared by {size} processes ({first_line(error)})"
        ) from None


def layer_plan(model: Any) -> dict[str, str]:
    """The rules of a model's plan that concern its decoder layers and name something there.

    Families write rules for layers that a given model may not have, such as those without
    experts.
    """
    parts = [name for name, _ in model.named_modules()] + [n for n, _ in model.named_parameters()]
    general = {re.sub(r"\.\d+\.", ".*.", name) for name in parts}
    plan: dict[str, str] = model.tp_plan or {}
    return {rule: style for rule, style in plan.items() if ".layers." in rule and rule in general}


def refuse_what_cannot_be_shared(
    model: Any, plan: dict[str, str], size: int, device: torch.device
) -> None:
    """transformers would cut through a head without a word."""
    family, config = type(model).__name__, model.config.get_text_config()
    if not plan:
        raise TargetError(
            f"{family}: transformers has no tensor-parallel plan for this family; run it without "
            "--tensor-parallel"
        )
    for heads in ("num_attention_heads", "num_key_value_heads"):
        if (found := getattr(config, heads, None)) and found % size:
            raise ConfigError(
                f"--tensor-parallel {size}: {family} has {found} {heads}, which do not divide by "
                "that; take a number that divides both kinds of heads"
            )
    if size > 1 and torch.accelerator.is_available() and device.type == "cpu":
        raise ConfigError(
            "--tensor-parallel on the CPU: transformers takes the GPUs of this machine; hide them "
            "with CUDA_VISIBLE_DEVICES= or take --device cuda"
        )


@contextmanager
def own_device(device: torch.device) -> Iterator[None]:
    """transformers binds a process to the GPU that LOCAL_RANK names, which need not be its own."""
    before = os.environ.get("LOCAL_RANK")
    os.environ["LOCAL_RANK"] = str(device.index or 0)
    try:
        yield
    finally:
        if before is None:
            del os.environ["LOCAL_RANK"]
        else:
            os.environ["LOCAL_RANK"] = before
