"""How much memory a run takes on each device, part by part, before any of it is taken.

Counted from what the step allocates: its flat buffers, the frozen tensors and the batches to the
byte; what the backward pass keeps, tensor by tensor; and a share for the allocator's gaps.  Not
in it: the CUDA context and NCCL's own buffers, which torch does not allocate.

e bytes of a number, N parameters, T token slots, R rows of a micro-batch (its anchors times their
slots), H hidden size, Q and KV channels of all query and key heads, d of one, F width of the FFN,
V vocabulary.
"""

from dataclasses import replace

import torch

from dflash_fit.batch import Batch, BatchShape
from dflash_fit.config import MICROBATCH
from dflash_fit.feed import packs_in_memory
from dflash_fit.offline import HEAD_ROWS
from dflash_fit.shards import shard, shard_size
from dflash_fit.staging import PIECE, THREADS
from dflash_fit.work import Work, attention_widths, parameters_of

# What tensors of unequal size leave between them, as a share of what comes and goes.  By the rules
# of torch's CUDA allocator, allocations of a compiled step of the shapes of Qwen3.6-27B's drafter
# leave 3% (one micro-batch of anchors) to 11% (four); what ran before leaves some too.
GAPS = 0.15
BYTES = {"bf16": 2, "fp32": 4}


def memory_of(work: Work) -> dict[str, int]:
    """Bytes of each part on one device at the step's peak, measuring included."""
    lasting = {
        "weights": parameters_of(work.drafter) * _e(work),
        "masters and moments": masters_and_moments(work),
        "fp32 sums of gradients": sums(work),
        "reduce buffers": reduce_buffers(work),
        "embedding and head": frozen(work),
        "batches": batches(work),
    }
    passing = {
        "gradients": gradients(work),
        "context": context(work),
        "activations": activations(work),
        "head or layer at work": max(head_chunk(work), backward_of_layer(work)),
    }
    taken = sum(passing.values())
    # A graph keeps its memory to itself; without one, measuring takes the place of training.
    measuring = measuring_at_work(work) - (0 if work.captured else taken)
    return {
        **lasting,
        **passing,
        "gaps": round(GAPS * taken) if work.device_type == "cuda" else 0,
        "measuring": batch_bytes(own_batch(work)) + max(0, measuring),
    }


def pinned_of(work: Work) -> int:
    """Bytes of host memory that one rank pins: for its feed, and to copy checkpoints through."""
    return host_batches(work) + THREADS * PIECE if work.device_type == "cuda" else 0


def host_of(work: Work) -> int:
    """Bytes of host memory of rank 0, which takes the most."""
    return copies(work) + (pinned_of(work) or host_batches(work))


def host_batches(work: Work) -> int:
    """Bytes of the feed's packs."""
    packs = packs_in_memory(turns=work.turns, passes=work.passes_per_pack)
    return packs * batch_bytes(work.shape)


def copies(work: Work) -> int:
    """Bytes of host memory that rank 0 writes checkpoints from: the weights, and its part."""
    count = parameters_of(work.drafter)
    return count * _e(work) + 3 * 4 * int(shard(count, rank=0, world=work.ranks).stop)


def _e(work: Work) -> int:
    return BYTES[work.precision]


def _rows(work: Work) -> int:
    return min(work.anchor_microbatch, work.shape.anchors) * work.shape.block_size


# --- what lasts -----------------------------------------------------------------------------------


def masters_and_moments(work: Work) -> int:
    """Three fp32 numbers of each parameter, of all or of those of this rank."""
    count = parameters_of(work.drafter)
    return 3 * 4 * (shard_size(count, world=work.ranks) if work.sharded else count)


def sums(work: Work) -> int:
    """The flat sum over packs, where the buffers of one backward pass are not the sum already."""
    whole, alone = 4 * parameters_of(work.drafter), work.ranks == 1
    if work.device_type == "cpu" and not alone:
        return 3 * whole  # the sum, a pack of another rank, and its own to send
    travels_wider = not (alone or work.sharded) and work.reduce != work.precision
    return whole if work.turns > 1 or travels_wider else 0


def reduce_buffers(work: Work) -> int:
    """All gradients to send and a shard of them to receive, where each rank gets its own."""
    if not work.sharded or work.ranks == 1 or work.device_type == "cpu":
        return 0
    size = shard_size(parameters_of(work.drafter), world=work.ranks)
    return BYTES[work.reduce] * (work.ranks + 1) * size


def frozen(work: Work) -> int:
    table = work.drafter.vocab_size * work.drafter.hidden_size * _e(work)
    return table if work.tied else 2 * table


def batches(work: Work) -> int:
    """The feed's slot and the graph's input; a CPU trains on the feed's host batches themselves."""
    if work.device_type == "cpu":
        return host_batches(work)
    return (2 if work.captured else 1) * batch_bytes(work.shape)


def batch_bytes(shape: BatchShape) -> int:
    return sum(t.nbytes for t in Batch.empty(shape, device=torch.device("meta")).tensors())


# --- what comes and goes --------------------------------------------------------------------------


def gradients(work: Work) -> int:
    """Of all parameters; of a single micro-batch they take the place of its activations."""
    whole = parameters_of(work.drafter) * _e(work)
    return whole if work.microbatches > 1 else max(0, whole - activations(work))


def context(work: Work) -> int:
    """Rows, keys and values of all layers, what their backward keeps, and their gradients."""
    drafter, e = work.drafter, _e(work)
    _, kv = attention_widths(drafter)
    h, d, layers = drafter.hidden_size, drafter.head_dim, drafter.num_hidden_layers
    features = len(drafter.target_layer_ids) * h
    rows = e * (features + 2 * h)
    keys_values = layers * e * 3 * kv
    # fp32, and rounded anew by each layer where rows are not.
    angles = 2 * d * (layers * e if work.precision == "bf16" else 4)
    roots = 4 * (1 + layers * drafter.num_key_value_heads)  # of the norms
    wide = 0 if work.captured else 4 * (h + layers * kv)  # what they read, if not compiled
    leaf_gradients = layers * e * 2 * kv
    return work.shape.token_budget * (rows + keys_values + angles + roots + wide + leaf_gradients)


def activations(work: Work) -> int:
    """What a micro-batch leaves for its backward, and what the one before left behind."""
    drafter, e, rows = work.drafter, _e(work), _rows(work)
    h = drafter.hidden_size
    kept = drafter.num_hidden_layers * (rows * row_bytes(work) + attention_bytes(work))
    # In and out of the drafter: rows before and behind the last norm, and their gradient.
    ends = 3 * e * h * rows
    before = 3 * e * h * rows if work.microbatches > 1 else 0
    return kept + ends + before + mask_bytes(work)


def row_bytes(work: Work) -> int:
    """What one layer keeps of one row: before and behind each norm, projection and product."""
    drafter, e = work.drafter, _e(work)
    q, kv = attention_widths(drafter)
    h, f = drafter.hidden_size, drafter.intermediate_size
    kept = e * (4 * h + 3 * q + 3 * kv + 3 * f)
    kept += 4 * (2 + drafter.num_attention_heads + drafter.num_key_value_heads)  # roots of norms
    kept += 2 * e * drafter.head_dim if work.precision == "bf16" else 0  # angles, rounded
    # Op by op, autograd keeps the gate on both sides of its SiLU, and what norms read in fp32.
    return kept if work.captured else kept + e * f + 4 * (2 * h + q + kv)


def attention_bytes(work: Work) -> int:
    """What attention of one layer keeps beside its rows."""
    q, kv = attention_widths(work.drafter)
    e, rows = _e(work), _rows(work)
    keys = work.shape.token_budget + rows
    match work.attention:
        case "dense":  # the mask as numbers; keys and values for every query head
            return e * (rows * keys + 2 * q * keys + q * rows)
        case "flex":  # context and own keys and values behind each other
            return e * 2 * kv * keys
    return 0


def mask_bytes(work: Work) -> int:
    """Masks of every pair: one for each look of a layer, and one while a layer attends."""
    if work.attention != "dense":
        return 0
    looks = {work.drafter.look(layer) for layer in range(work.drafter.num_hidden_layers)}
    return (len(looks) + 1) * _rows(work) * (work.shape.token_budget + _rows(work))


def head_chunk(work: Work) -> int:
    """Logits of a chunk, the teacher's too; on a CPU with what fp32 softmax takes."""
    slots = min(work.loss_chunk, work.anchor_microbatch) * (work.shape.block_size - 1)
    each = work.drafter.vocab_size * slots
    logits = each * _e(work) * (2 if work.shape.final_hidden else 1)
    if work.device_type == "cuda":
        return logits
    copies = (2 if work.shape.final_hidden else 1) * (work.precision == "bf16")
    products = 1 + work.shape.final_hidden
    return logits + 4 * each * (copies + products)


def backward_of_layer(work: Work) -> int:
    """The gradients of two products of the FFN, which live together.

    Those of dense attention's keys and values, for every query head, come when the layer's FFN has
    let go of what it kept.
    """
    rows, width = _rows(work) * _e(work), work.drafter.intermediate_size
    ffn = 2 * width * rows
    if work.attention != "dense":
        return ffn
    q, _ = attention_widths(work.drafter)
    keys = (work.shape.token_budget + _rows(work)) * _e(work)
    return max(ffn, 2 * 2 * q * keys - (3 if work.captured else 4) * width * rows)


# --- measuring ------------------------------------------------------------------------------------


def own_batch(work: Work) -> BatchShape:
    """What is right needs no teacher."""
    return replace(work.shape, final_hidden=False)


def measuring_at_work(work: Work) -> int:
    """What measuring takes beside its batch: op by op, without gradients."""
    if work.attention == "flex":  # which only a compiled step has
        few = min(work.anchor_microbatch, MICROBATCH["cpu"])
        work = replace(work, attention="dense", anchor_microbatch=few)
    drafter, e, rows, shape = work.drafter, _e(work), _rows(work), own_batch(work)
    h, tokens = drafter.hidden_size, shape.token_budget
    q, kv = attention_widths(drafter)
    features = shape.target_layers * h
    widened = 0 if shape.encoding == "bf16" else BYTES["bf16"] * features
    projecting = tokens * (widened + e * (features + h) + 2 * 4 * h)
    keys_values = tokens * drafter.num_hidden_layers * e * 2 * kv
    ffn = rows * e * (3 * drafter.intermediate_size + 3 * h)
    attention = rows * e * (h + 3 * q + 2 * kv) + attention_bytes(work)
    logits = min(HEAD_ROWS, rows) * drafter.vocab_size * e + 3 * e * h * rows
    return max(projecting, keys_values + mask_bytes(work) + max(ffn, attention, logits))
