"""What a run is to do, in numbers: its shapes, how often, on how many ranks.

K target layers, T token slots, A anchors, B block size, H hidden size, V vocabulary.  A pack is
trained on all its slots and blocks, padding or not: the step has one shape.
"""

from dataclasses import dataclass

from dflash_fit.batch import BatchShape
from dflash_fit.drafter import DrafterConfig


@dataclass(frozen=True, kw_only=True)
class Work:
    """Everything that decides what a run takes."""

    drafter: DrafterConfig
    shape: BatchShape
    steps: int  # updates
    packs_per_step: int  # of all ranks together
    passes_per_pack: int  # updates that a pack serves once it is read
    ranks: int
    packs_per_epoch: int
    tokens_per_epoch: int  # of the samples that train
    anchors_per_pack: float  # that are valid, on average
    state_bytes_per_token: float  # of one plane, on disk
    anchor_microbatch: int
    loss_chunk: int  # blocks
    precision: str  # "bf16" or "fp32": of weights and arithmetic
    reduce: str  # "bf16" or "fp32": in which gradients travel between ranks
    sharded: bool  # masters and moments are split over the ranks
    captured: bool  # compiled, and replayed as CUDA graphs
    attention: str  # "block", "flex" or "dense"; never "auto"
    tied: bool  # the target's embedding is its head too
    device_type: str  # "cuda" or "cpu"

    @property
    def turns(self) -> int:
        """Packs of an update on one rank, an idle one where they do not come out even."""
        return -(-self.packs_per_step // self.ranks)

    @property
    def microbatches(self) -> int:
        return -(-self.shape.anchors // self.anchor_microbatch)

    @property
    def packs(self) -> int:
        """Of the whole run; one that is trained twice counts twice."""
        return self.steps * self.packs_per_step

    @property
    def tokens_per_pack(self) -> float:
        return self.tokens_per_epoch / self.packs_per_epoch

    @property
    def read_bytes_per_pack(self) -> float:
        return self.tokens_per_pack * self.shape.planes * self.state_bytes_per_token


def attention_widths(drafter: DrafterConfig) -> tuple[int, int]:
    """Channels of all query heads, and of all key heads."""
    heads, kv_heads = drafter.num_attention_heads, drafter.num_key_value_heads
    return heads * drafter.head_dim, kv_heads * drafter.head_dim


def layer_matrices(drafter: DrafterConfig) -> int:
    """Elements of the matrices of one layer."""
    q, kv = attention_widths(drafter)
    h = drafter.hidden_size
    return h * (q + 2 * kv) + q * h + 3 * h * drafter.intermediate_size


def parameters_of(drafter: DrafterConfig) -> int:
    """Elements that are trained."""
    h, layers = drafter.hidden_size, drafter.num_hidden_layers
    norms = 2 * h + layers * (2 * h + 2 * drafter.head_dim)
    return len(drafter.target_layer_ids) * h * h + layers * layer_matrices(drafter) + norms


def useful_flop(
    drafter: DrafterConfig, *, tokens: int, anchors: int, teacher: bool = False
) -> float:
    """FLOP of the matrix products that one pass over a pack needs; attention is not counted.

    A fixed count, so that ways to train compare.  Of the layers' share the step leaves out 2%:
    the anchors' own slots behind the last layer's attention.

    `fc` forward and weight gradient; context keys and values, and the layers on all slots,
    three products each; the frozen head on B - 1 slots, forward and input gradient, and once
    more forward where a `teacher` speaks through it.
    """
    h, layers = drafter.hidden_size, drafter.num_hidden_layers
    fc = 2 * 2 * tokens * (len(drafter.target_layer_ids) * h) * h
    context = 3 * 2 * tokens * h * (2 * attention_widths(drafter)[1]) * layers
    blocks = 3 * 2 * anchors * drafter.block_size * layer_matrices(drafter) * layers
    slots = anchors * (drafter.block_size - 1)
    head = (3 if teacher else 2) * 2 * slots * h * drafter.vocab_size
    return float(fc + context + blocks + head)


def useful_flop_of(work: Work) -> float:
    """Of one pass over one pack of a run."""
    shape = work.shape
    return useful_flop(
        work.drafter,
        tokens=shape.token_budget,
        anchors=shape.anchors,
        teacher=shape.final_hidden,
    )
