"""A target with experts one of whose routers is all but tied, and kernels that sum otherwise."""

from pathlib import Path

import torch
from families import load, save_family

from dflash_cache.target import Target

TIED = 2  # the layer of that router


class OtherKernels(Target):
    """In a batch the scores of its routers round otherwise than for a lone row."""

    def hidden_states(self, input_ids, layer_ids):
        if len(input_ids) == 1:
            return super().hidden_states(input_ids, layer_ids)
        weight = self.layers[TIED].mlp.gate.weight
        before = weight.clone()
        weight += 3e-7 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
        try:
            return super().hidden_states(input_ids, layer_ids)
        finally:
            weight.copy_(before)


def all_but_tied(folder: Path) -> OtherKernels:
    """Of three experts out of four either is chosen, by scores that differ by rounding."""
    target = load(save_family(folder, "qwen3_moe", num_hidden_layers=8))
    moe = target.layers[TIED].mlp
    generator = torch.Generator().manual_seed(1)
    moe.gate.weight[2:] = moe.gate.weight[1] + 1e-5 * torch.randn(2, 32, generator=generator)
    moe.experts.down_proj *= 4  # so that it matters which
    return OtherKernels(**vars(target))
