"""The drafter against a second, slow one: names, shapes, logits and gradients."""

import math

import pytest
import torch
from reference import (
    ReferenceDrafter,
    make_document,
    make_frozen,
    make_weights,
    pack,
    small,
    tensor_shapes,
)

from dflash_cache.errors import ConfigError
from dflash_fit.attention import Visibility
from dflash_fit.batch import Batch
from dflash_fit.drafter import (
    DFlashDraftModel,
    DrafterConfig,
    RMSNorm,
    block_ids,
    block_positions,
    rotary,
    rotate,
)
from dflash_fit.step import Frozen, Pieces, run_blocks

FULL, SLIDING = "full_attention", "sliding_attention"
KINDS = {
    "full": small(),
    "full, causal": small(is_causal=True),
    "sliding then full": small(
        num_hidden_layers=3, layer_types=(SLIDING, SLIDING, FULL), sliding_window=6
    ),
    "sliding": small(layer_types=(SLIDING,), sliding_window=9),
    "sliding, not causal": small(layer_types=(SLIDING,), sliding_window=3, is_causal=False),
    "window of one, block of seven": small(
        layer_types=(SLIDING, FULL), sliding_window=1, block_size=7
    ),
    "one feature, one key head": small(target_layer_ids=(4,), num_key_value_heads=1),
    "heads wider than the model": small(head_dim=16, num_key_value_heads=4, rope_theta=1e6),
}
every_kind = pytest.mark.parametrize("settings", KINDS.values(), ids=KINDS.keys())

# The second of three documents is the one looked at; its anchors lie nearer than a block, one
# has the shortest context and one is the last position.
LENGTHS = (11, 29, 6)
ANCHORS = [(1, 1), (1, 2), (1, 13), (1, 15), (1, 28)]


def both(settings, *, seed=0):
    """Our drafter and the slow one with equal weights, a frozen pair, and three documents."""
    generator = torch.Generator().manual_seed(seed)
    weights = make_weights(settings, generator)
    ours, theirs = DFlashDraftModel(DrafterConfig(**settings)), ReferenceDrafter(settings)
    ours.load_state_dict(weights, strict=True)
    theirs.load_state_dict(weights, strict=True)
    frozen = make_frozen(generator, settings=settings)
    documents = [make_document(n, generator=generator, settings=settings) for n in LENGTHS]
    return ours, theirs, frozen, documents


def our_logits(drafter, frozen, batch):
    """Logits [A, B - 1, V] of slots 1 .. B - 1, through the calls of the training step."""
    context = drafter.context(batch.hidden, batch.position_ids)
    rows = run_blocks(drafter, Frozen(**frozen), batch, context, slice(None), Pieces())
    return rows @ frozen["head"].T


def their_logits(model, frozen, documents, anchors):
    rows = [documents[d].block(model, a, frozen["embedding"])[1:] for d, a in anchors]
    return torch.stack(rows) @ frozen["head"].T


@every_kind
def test_packed_blocks_equal_lone_ones(settings):
    ours, theirs, frozen, documents = both(settings)
    batch = Batch(**pack(documents, ANCHORS, token_budget=72, slots=7))
    expected = their_logits(theirs, frozen, documents, ANCHORS)
    torch.testing.assert_close(our_logits(ours, frozen, batch)[:5], expected, atol=2e-5, rtol=1e-4)


@every_kind
def test_gradients_of_packed_blocks_equal_those_of_lone_ones(settings):
    ours, theirs, frozen, documents = both(settings)
    batch = Batch(**pack(documents, ANCHORS, token_budget=72, slots=7))
    our_logits(ours, frozen, batch)[:5].square().mean().backward()
    their_logits(theirs, frozen, documents, ANCHORS).square().mean().backward()
    wanted = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        close = {"atol": 1e-5 * float(wanted[name].grad.abs().max()), "rtol": 1e-3}
        torch.testing.assert_close(parameter.grad, wanted[name].grad, **close)


@every_kind
def test_tensors_have_the_names_and_shapes_of_a_checkpoint(settings):
    state = DFlashDraftModel(DrafterConfig(**settings)).state_dict()
    assert {n: tuple(t.shape) for n, t in state.items()} == tensor_shapes(settings)
    assert len(state) == 11 * settings["num_hidden_layers"] + 3


@pytest.mark.parametrize(
    ("parameters", "changes"),
    [
        (1_730_213_120, {"hidden_size": 5120, "intermediate_size": 17408}),
        (1_048_626_432, {"hidden_size": 4096, "intermediate_size": 12288}),
        (537_427_200, {"hidden_size": 2560, "intermediate_size": 9728}),
    ],
    ids=["27B", "8B", "4B"],
)
def test_published_drafters_have_as_many_parameters(parameters, changes):
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    layers = {"num_hidden_layers": 5, "target_layer_ids": (1, 16, 31, 46, 61)}
    with torch.device("meta"):
        drafter = DFlashDraftModel(DrafterConfig(**small(**changes, **heads, **layers)))
    assert sum(p.numel() for p in drafter.parameters()) == parameters


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_is_that_of_qwen3_bit_for_bit(dtype):
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    ours, theirs = RMSNorm(16, 1e-6), Qwen3RMSNorm(16, 1e-6)
    x = torch.randn(50, 16, dtype=dtype) * 3
    for norm in (ours, theirs):
        norm.weight.data = torch.linspace(-1, 2, 16, dtype=dtype)
    assert torch.equal(ours(x), theirs(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_rotary_embedding_is_that_of_qwen3_bit_for_bit(dtype):
    from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import (
        Qwen3RotaryEmbedding,
        apply_rotary_pos_emb,
    )

    rope = {"rope_theta": 1e7, "rope_type": "default"}
    qwen = Qwen3RotaryEmbedding(Qwen3Config(head_dim=16, rope_parameters=rope))
    positions = torch.tensor([0, 1, 7, 4096, 200_000])
    x = torch.randn(3, 5, 16, dtype=dtype)
    wanted, _ = apply_rotary_pos_emb(x[None], x[None], *qwen(x, positions[None]))
    assert torch.equal(rotate(x, *rotary(positions, head_dim=16, theta=1e7)), wanted[0])


def test_a_block_is_the_anchor_and_then_masks_at_the_positions_that_follow():
    ids = block_ids(torch.tensor([5, 6]), block_size=3, mask_token_id=39)
    positions = block_positions(torch.tensor([10, 20]), block_size=3)
    assert ids.tolist() == [[5, 39, 39], [6, 39, 39]]
    assert positions.tolist() == [[10, 11, 12], [20, 21, 22]]


def test_initial_weights_repeat_and_are_normal_matrices_and_unit_norms():
    first, again, other = (DFlashDraftModel(DrafterConfig(**small())) for _ in range(3))
    for drafter, seed in ((first, 1), (again, 1), (other, 2)):
        drafter.initialize(torch.Generator().manual_seed(seed))
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name])
        if tensor.dim() == 1:
            assert (tensor == 1).all()
        else:
            assert float(tensor.std()) == pytest.approx(0.02, rel=6 / math.sqrt(tensor.numel()))
            assert not torch.equal(tensor, other.state_dict()[name])


@pytest.mark.parametrize(
    ("said", "looks"),
    [
        (None, [Visibility(window=6, causal=True), Visibility(window=None, causal=False)]),
        (True, [Visibility(window=6, causal=True), Visibility(window=None, causal=True)]),
        (False, [Visibility(window=6, causal=False), Visibility(window=None, causal=False)]),
    ],
)
def test_sliding_layers_are_causal_unless_the_configuration_says_otherwise(said, looks):
    config = DrafterConfig(**small(layer_types=(SLIDING, FULL), sliding_window=6, is_causal=said))
    assert [config.look(layer) for layer in range(2)] == looks


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 3}, "cannot share"),
        ({"head_dim": 7}, "want an even one"),
        ({"layer_types": (FULL,) * 3}, "3 layer types for 2 drafter layers"),
        ({"layer_types": (SLIDING, FULL)}, "with a window"),
        ({"layer_types": ("linear_attention",)}, "layer types"),
        ({"mask_token_id": 40}, "no such row"),
        ({"mask_token_id": -1}, "no such row"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        DrafterConfig(**small(**changes))
