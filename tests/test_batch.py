"""Host and device buffers of one shape: page-aligned, pinned while they live, copied whole."""

import gc
from types import SimpleNamespace

import pytest
import torch

from dflash_cache.encodings import ENCODINGS, decode, encode
from dflash_cache.errors import DFlashError
from dflash_cache.layout import ALIGNMENT
from dflash_cache.pinned import host_tensor
from dflash_fit.batch import Batch, BatchShape

CPU = torch.device("cpu")


def shape_in(encoding: str) -> BatchShape:
    return BatchShape(
        target_layers=2, token_budget=24, hidden_size=8, anchors=3, block_size=4, encoding=encoding
    )


@pytest.mark.parametrize("encoding", list(ENCODINGS))
def test_an_empty_batch_is_all_padding_in_the_parts_of_its_encoding(encoding):
    batch = Batch.empty(shape_in(encoding), device=CPU)
    wanted = {
        part.name: (part.dtype, (2, 24, 8) if part.per_channel else (2, 24))
        for part in ENCODINGS[encoding].parts
    }
    assert {name: (p.dtype, tuple(p.shape)) for name, p in batch.parts.items()} == wanted
    assert batch.states().dtype == torch.bfloat16
    assert batch.states().shape == (2, 24, 8)
    assert not batch.states().any()
    assert (batch.document_ids == -1).all()
    assert not batch.anchor_valid.any()


@pytest.mark.parametrize("encoding", list(ENCODINGS))
def test_every_host_buffer_begins_on_a_page(encoding):
    """Where direct reads can put what they read."""
    batch = Batch.empty(shape_in(encoding), device=CPU)
    assert {tensor.data_ptr() % ALIGNMENT for tensor in batch.tensors() if tensor.numel()} == {0}


def test_states_of_bfloat16_are_the_very_buffer():
    batch = Batch.empty(shape_in("bf16"), device=CPU)
    assert batch.states().data_ptr() == batch.hidden.data_ptr()


@pytest.mark.parametrize("encoding", list(ENCODINGS))
def test_a_batch_takes_over_all_of_another(encoding):
    states = torch.randn(2, 24, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    channels = torch.linspace(0.5, 2, 16).view(2, 1, 8)
    parts = encode(encoding, states, channels)
    batch, other = (Batch.empty(shape_in(encoding), device=CPU) for _ in range(2))
    for name, part in batch.parts.items():
        part.copy_(parts[name])
    if ENCODINGS[encoding].static_scales:
        batch.channels.copy_(channels[:, 0])
    batch.input_ids.fill_(7)
    other.copy_(batch)
    assert torch.equal(other.states(), decode(encoding, parts, channels))
    assert (other.input_ids == 7).all()


# --- pinned memory, with CUDA's two calls recorded ------------------------------------------------


@pytest.fixture
def cuda(monkeypatch):
    """What is registered, by address; registering fails with `refuse`."""
    state = SimpleNamespace(held={}, refuse=0)

    def register(address: int, size: int, flags: int) -> int:
        if state.refuse:
            return state.refuse
        assert address not in state.held
        state.held[address] = size
        return 0

    cudart = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=state.held.pop)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    return state


def test_memory_is_pinned_in_exactly_its_size_for_as_long_as_anything_looks_at_it(cuda):
    tensor = host_tensor((3, 1000), torch.bfloat16, pinned=True)
    gc.collect()
    assert cuda.held == {tensor.data_ptr(): 6000}
    part = tensor[1].view(torch.uint8)
    del tensor
    gc.collect()
    assert len(cuda.held) == 1
    del part
    gc.collect()
    assert cuda.held == {}


@pytest.mark.parametrize("encoding", list(ENCODINGS))
def test_every_buffer_of_a_pinned_batch_is_pinned(cuda, encoding):
    batch = Batch.empty(shape_in(encoding), device=CPU, pinned=True)
    wanted = {t.data_ptr(): t.nbytes for t in batch.tensors() if t.numel()}
    assert cuda.held == wanted
    del batch
    gc.collect()
    assert cuda.held == {}


def test_memory_that_is_not_to_be_pinned_is_not(cuda):
    host_tensor((3, 1000), torch.bfloat16, pinned=False)
    assert cuda.held == {}


def test_memory_that_cannot_be_pinned_is_one_message(cuda):
    cuda.refuse = 2
    with pytest.raises(DFlashError, match=r"0\.01 GB .* \(CUDA error 2\).*smaller --token-budget"):
        host_tensor((5, 1_000_000), torch.bfloat16, pinned=True)
