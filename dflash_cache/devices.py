"""Names of devices and precisions, as the options spell them."""

from contextlib import suppress

import torch

from dflash_cache.errors import ConfigError

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def pick_device(name: str) -> torch.device:
    """`auto` is a GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = None
    with suppress(RuntimeError):
        device = torch.device(name)
    if device is None or device.type not in ("cpu", "cuda"):
        raise ConfigError(f"--device {name}: want auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"--device {name}: this torch sees no GPU; use --device cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"--device {name}: this torch sees {torch.cuda.device_count()} GPUs, numbered from 0"
        )
    return device
