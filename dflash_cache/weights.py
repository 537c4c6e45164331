"""Load the weights of a target: frozen, complete, and no more of them than is needed.

The model is built without memory (torch's meta device), what is not needed is cut away, and the
tensors that are left go from the mapped files straight to their device, one decoder layer after
the other.  Nothing is ever twice in RAM: file pages are the kernel's and shared by all processes
of a machine, and where a family stores its weights otherwise than it runs them (one tensor per
expert in the file, one per layer in the model), it is the device that puts them together.

Names and conversions are transformers' own, through the functions that its `from_pretrained`
calls.  That itself reads to a device only with the package `accelerate`, puts the parts of a fused
weight together in RAM without it, and cannot leave out what is above a layer.
"""

import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from tqdm import tqdm

from dflash_cache.devices import DTYPES, pick_device
from dflash_cache.errors import TargetError
from dflash_cache.kernels import choose_attention, warn_of_slow_layers
from dflash_cache.stored import stored_tensors
from dflash_cache.survey import (
    Survey,
    find_layers,
    first_line,
    survey_target,
    with_weights_hash,
)
from dflash_cache.target import Target, cut_above, module_name
from dflash_cache.tensor_parallel import shard_layers

LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def load_target(name: str, *, dtype: str, device: str) -> Target:
    """Find, describe, hash and load a target."""
    return load_weights(with_weights_hash(survey_target(name, dtype=dtype)), device=device)


def load_weights(
    survey: Survey,
    *,
    device: str,
    up_to: int | None = None,
    attention: str = "auto",
    tensor_parallel: bool = False,
) -> Target:
    """Load a surveyed target: frozen, in evaluation mode, with every weight that it should have.

    `up_to` is the last target layer needed; what lies above it, the final norm and the head are
    not even read.  With `tensor_parallel` every process of the `torch.distributed` world calls
    this and gets its own share of the layers; embedding and head are whole in each.
    """
    on = pick_device(device)
    if on.index is not None:
        # Where kernels of Triton run and memory is pinned; on another GPU a context of CUDA takes
        # half a GB, or finds no room.
        torch.cuda.set_device(on)
    model = build_empty(survey)
    choose_attention(model, attention, device=on, dtype=survey.spec.dtype)
    warn_of_slow_layers(model, survey.spec.name, device=on)
    if tensor_parallel:
        shard_layers(model, device=on)
    decoder, layers = find_layers(model)
    if up_to is not None:
        cut_above(model, decoder, layers, up_to)
        untie_what_is_gone(model)
    fill(model, survey, device=on)
    model.eval().requires_grad_(False)
    target = Target(
        model=model,
        decoder=decoder,
        layers=layers,
        tokenizer=survey.tokenizer,
        spec=survey.spec,
        stop_ids=survey.stop_ids,
        device=on,
    )
    if up_to is None:
        refuse_other_tie(target)
    return target


def untie_what_is_gone(model: Any) -> None:
    """Let transformers tie only weights that both are there."""
    left = model.state_dict().keys()
    pairs = model.all_tied_weights_keys
    model.all_tied_weights_keys = {a: b for a, b in pairs.items() if {a, b} <= left}


def build_empty(survey: Survey) -> Any:
    """The causal LM of a target, with its shapes and without memory."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(survey.folder)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, dtype=DTYPES[survey.spec.dtype])
    except Exception as error:  # transformers raises many kinds; all mean "cannot be loaded"
        raise TargetError(f"{survey.spec.name}: cannot be loaded ({first_line(error)})") from None


def fill(model: Any, survey: Survey, *, device: torch.device) -> None:
    """Give an empty model its weights; refuses when they are not those of its config."""
    name = survey.spec.name
    read = read_weights if transformers_can_stream() else read_through_ram
    try:
        with quiet_transformers():
            found = read(model, survey, device)
    except TargetError:
        raise
    except torch.OutOfMemoryError as error:
        raise TargetError(f"{name}: {no_room(device, str(error))}") from None
    except Exception as error:  # transformers raises many kinds; all mean "cannot be loaded"
        raise TargetError(f"{name}: cannot be loaded ({first_line(error)})") from None
    if found.mismatched_keys:
        raise TargetError(
            f"{name}: weights have other shapes than config.json says "
            f"({sorted(map(str, found.mismatched_keys))[:2]} ...); are both of one model?"
        )
    if found.missing_keys:
        raise TargetError(
            f"{name}: weights are missing ({sorted(found.missing_keys)[:3]} ...); it would run "
            "with random ones. Is the folder complete?"
        )
    if strange := strange_weights(model, found.unexpected_keys, survey.spec.num_layers):
        raise TargetError(
            f"{name}: config.json knows nothing of weights that are there ({strange[:3]} ...); "
            "it would run without them. Are both of one model?"
        )


def strange_weights(model: Any, unexpected: set[str], num_layers: int) -> list[str]:
    """Weights of decoder layers that no layer of the model has taken, though it runs.

    Vision towers and extra heads are not of the decoder; what lies above a cut is not missed.
    """
    decoder = model.get_decoder()
    own = re.compile(rf"{re.escape(module_name(model, decoder))}\.layers\.(\d+)\.")
    left_out = range(len(decoder.layers), num_layers)
    found = {key: own.match(key) for key in unexpected}
    return sorted(key for key, match in found.items() if match and int(match[1]) not in left_out)


def refuse_other_tie(target: Target) -> None:
    """The library unties a pair whose weights differ, whatever the config says."""
    if (target.head.data_ptr() == target.embedding.data_ptr()) != target.spec.tied_head:
        raise TargetError(
            f"{target.spec.name}: config.json says tie_word_embeddings = {target.spec.tied_head}, "
            "the weights say otherwise; correct config.json, or drafters would learn against a "
            "wrong head"
        )


def transformers_can_stream() -> bool:
    """Whether the parts of its `from_pretrained` that we call are where they were (5.17, 5.24)."""
    try:
        from transformers import PreTrainedModel
        from transformers.conversion_mapping import get_model_conversion_mapping  # noqa: F401
        from transformers.core_model_loading import (
            convert_and_load_state_dict_in_model,  # noqa: F401
        )
        from transformers.modeling_utils import LoadStateDictConfig  # noqa: F401
    except ImportError:
        return False
    return all(hasattr(PreTrainedModel, n) for n in ("_finalize_model_loading", "_get_dtype_plan"))


def read_weights(model: Any, survey: Survey, device: torch.device) -> Any:
    """Fill a model from the tensors that it has a place for, layer by layer.

    Only those are read: names are matched before anything is touched.  Returns transformers'
    account of what was missing, unexpected and of another shape.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    dtype = DTYPES[survey.spec.dtype]
    settings = LoadStateDictConfig(
        device_map={"": device},
        dtype=dtype,
        dtype_plan=model._get_dtype_plan(dtype),
        ignore_mismatched_sizes=True,
        weight_mapping=get_model_conversion_mapping(model),
    )
    account: Any = None
    groups = by_layer(stored_tensors(survey.folder)) or [{}]
    for group in tqdm(groups, desc="load weights", unit="layer", leave=False, disable=None):
        found, _ = convert_and_load_state_dict_in_model(model, group, settings)
        account = found if account is None else merged(account, found)
    for weight, error in account.conversion_errors.items():
        told = no_room(device, error) if "out of memory" in error else no_whole(weight, error)
        raise TargetError(f"{survey.spec.name}: {told}")
    return model._finalize_model_loading(model, settings, account)


def no_whole(weight: str, error: str) -> str:
    """That the parts of a weight do not go together; `error` may be a traceback."""
    reason = " ".join(error.strip().splitlines()[-2:])
    return f"{weight} cannot be put together ({reason[:300]}); is the folder complete?"


def no_room(device: torch.device, error: str) -> str:
    """That a target is larger than its GPU."""
    reason = next(line for line in error.splitlines() if "out of memory" in line)
    return (
        f"does not fit on {device} ({reason.strip()[:200]}); free the GPU, or share the target "
        "among several with --tensor-parallel"
    )


def read_through_ram(model: Any, survey: Survey, device: torch.device) -> Any:
    """The same by plain `from_pretrained`, whole and in RAM first: slower, and said to be."""
    import transformers

    tqdm.write(
        f"transformers {transformers.__version__} loads otherwise than the versions that we know: "
        "the weights go through RAM, all of them, in every process",
        file=sys.stderr,
    )
    if getattr(model, "_tp_size", None):
        raise TargetError(
            f"--tensor-parallel does not work with transformers {transformers.__version__}; "
            "take 5.24"
        )
    loaded, found = type(model).from_pretrained(
        survey.folder,
        config=model.config,
        dtype=DTYPES[survey.spec.dtype],
        output_loading_info=True,
        ignore_mismatched_sizes=True,
    )
    loaded.to(device)
    for name, module in model.named_modules():
        source = loaded.get_submodule(name)
        for held, taken in (
            (module._parameters, source._parameters),
            (module._buffers, source._buffers),
        ):
            held.update((key, taken[key]) for key in held)
    return SimpleNamespace(**found)


def by_layer(tensors: dict[str, Any]) -> list[dict[str, Any]]:
    """Tensors in groups that go to the device at once: a layer each, and all others.

    transformers reads a group with several threads and puts its parts together when all of them
    are there; in one group of everything, parts and wholes would be on the device together.
    """
    groups: dict[int, dict[str, Any]] = defaultdict(dict)
    for name, tensor in tensors.items():
        found = LAYER.search(name)
        groups[int(found[1]) if found else -1][name] = tensor
    return [groups[number] for number in sorted(groups)]


def merged(account: Any, found: Any) -> Any:
    """One account of two groups: missing is what neither of them had."""
    account.missing_keys &= found.missing_keys
    account.unexpected_keys |= found.unexpected_keys
    account.mismatched_keys |= found.mismatched_keys
    account.conversion_errors.update(found.conversion_errors)
    return account


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Without its bars and its table of weights: one bar and our errors say it."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
