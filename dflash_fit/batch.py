"""The one shape of stage two, and the batch that has it: host buffer and device buffer alike.

K target layers, T token slots, H hidden size, A anchors, B block size.
"""

from dataclasses import dataclass, fields
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class BatchShape:
    """Stated once, checked at the border."""

    target_layers: int  # K
    token_budget: int  # T
    hidden_size: int  # H
    anchors: int  # A
    block_size: int  # B

    @property
    def slots(self) -> int:
        return self.anchors * self.block_size


@dataclass(kw_only=True, eq=False)
class Batch:
    """One packed batch.  Padding has document id -1; invalid anchors are at position 0."""

    hidden: Tensor  # bf16 [K, T, H]
    input_ids: Tensor  # int64 [T]
    position_ids: Tensor  # int64 [T], from 0 in every document
    document_ids: Tensor  # int32 [T]
    document_starts: Tensor  # int64 [T], the slot where the token's document begins
    loss_mask: Tensor  # bool [T]
    anchor_positions: Tensor  # int64 [A], ascending
    anchor_valid: Tensor  # bool [A]

    @classmethod
    def empty(cls, shape: BatchShape, *, device: torch.device, pinned: bool = False) -> Self:
        """All padding, no anchors."""
        tokens, anchors = (shape.token_budget,), (shape.anchors,)

        def new(size: tuple[int, ...], dtype: torch.dtype, value: int = 0) -> Tensor:
            return torch.full(size, value, dtype=dtype, device=device, pin_memory=pinned)

        return cls(
            hidden=new((shape.target_layers, *tokens, shape.hidden_size), torch.bfloat16),
            input_ids=new(tokens, torch.int64),
            position_ids=new(tokens, torch.int64),
            document_ids=new(tokens, torch.int32, -1),
            document_starts=new(tokens, torch.int64),
            loss_mask=new(tokens, torch.bool),
            anchor_positions=new(anchors, torch.int64),
            anchor_valid=new(anchors, torch.bool),
        )

    def tensors(self) -> list[Tensor]:
        return [getattr(self, field.name) for field in fields(self)]

    def copy_(self, other: "Batch") -> None:
        """Take over another batch of the same shape, without waiting for the copy."""
        for mine, theirs in zip(self.tensors(), other.tensors(), strict=True):
            assert mine.shape == theirs.shape, (mine.shape, theirs.shape)
            mine.copy_(theirs, non_blocking=True)
