"""The one shape of stage two, and the batch that has it: host buffer and device buffer alike.

K target layers, P planes (the K layers, then the final hidden state if the loss wants it),
T token slots, H hidden size, A anchors, B block size.
"""

from dataclasses import dataclass, fields
from typing import Self

import torch
from torch import Tensor

from dflash_cache.encodings import ENCODINGS, EXPONENTS, HIDDEN, SCALES, decode
from dflash_cache.pinned import host_tensor
from dflash_fit.attention import Blocks

ENCODING_OF = {encoding.parts[0].dtype: name for name, encoding in ENCODINGS.items()}


@dataclass(frozen=True, kw_only=True)
class BatchShape:
    """Stated once, checked at the border."""

    target_layers: int  # K
    token_budget: int  # T
    hidden_size: int  # H
    anchors: int  # A
    block_size: int  # B
    encoding: str = "bf16"  # of the states, as the cache keeps them
    final_hidden: bool = False  # one more plane: what the target's head reads

    @property
    def planes(self) -> int:
        """States of a token: K, and the final one where it is wanted."""
        return self.target_layers + self.final_hidden

    @property
    def slots(self) -> int:
        return self.anchors * self.block_size


@dataclass(kw_only=True, eq=False)
class Batch:
    """One packed batch.  Padding has document id -1; invalid anchors are at position 0.

    States come as the cache spells them and are widened on the device, by `states`.
    """

    hidden: Tensor  # [P, T, H], bf16 or what the encoding has in its place
    scales: Tensor  # fp32 [P, T] where the encoding scales tokens, otherwise [P, 0]
    exponents: Tensor  # uint8 [P, T, H] where the encoding splits numbers, otherwise [P, 0, H]
    channels: Tensor  # fp32 [P, H] where the encoding has static scales, otherwise [P, 0]
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
        encoding = ENCODINGS[shape.encoding]
        parts = {part.name: part.dtype for part in encoding.parts}
        planes, width = shape.planes, shape.hidden_size

        def new(size: tuple[int, ...], dtype: torch.dtype, value: int = 0) -> Tensor:
            if device.type == "cpu":
                return host_tensor(size, dtype, pinned=pinned).fill_(value)
            return torch.full(size, value, dtype=dtype, device=device)

        def rows(part: str) -> int:
            return shape.token_budget if part in parts else 0

        return cls(
            hidden=new((planes, rows(HIDDEN), width), parts[HIDDEN]),
            scales=new((planes, rows(SCALES)), torch.float32),
            exponents=new((planes, rows(EXPONENTS), width), torch.uint8),
            channels=new((planes, width if encoding.static_scales else 0), torch.float32),
            input_ids=new(tokens, torch.int64),
            position_ids=new(tokens, torch.int64),
            document_ids=new(tokens, torch.int32, -1),
            document_starts=new(tokens, torch.int64),
            loss_mask=new(tokens, torch.bool),
            anchor_positions=new(anchors, torch.int64),
            anchor_valid=new(anchors, torch.bool),
        )

    @property
    def parts(self) -> dict[str, Tensor]:
        """The parts that the encoding has, by the name that the reader knows them by."""
        every = {HIDDEN: self.hidden, SCALES: self.scales, EXPONENTS: self.exponents}
        return {name: part for name, part in every.items() if part.shape[1]}

    def states(self, planes: slice = slice(None)) -> Tensor:
        """States bf16 [planes, T, H]; a view of the batch's own where they are kept so."""
        parts = {name: part[planes] for name, part in self.parts.items()}
        return decode(ENCODING_OF[self.hidden.dtype], parts, self.channels[planes, None])

    def blocks(self, part: slice, *, block_size: int) -> Blocks:
        """Where the blocks of some anchors stand."""
        anchors = self.anchor_positions[part]
        return Blocks(
            anchors=anchors,
            starts=self.document_starts[anchors],
            valid=self.anchor_valid[part],
            context=len(self.input_ids),
            block_size=block_size,
        )

    def tensors(self) -> list[Tensor]:
        return [getattr(self, field.name) for field in fields(self)]

    def copy_(self, other: "Batch") -> None:
        """Take over another batch of the same shape, without waiting for the copy."""
        for mine, theirs in zip(self.tensors(), other.tensors(), strict=True):
            assert mine.shape == theirs.shape, (mine.shape, theirs.shape)
            mine.copy_(theirs, non_blocking=True)
