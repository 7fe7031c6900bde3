from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesim.simulator.layout.stages import blocks_of
from moesim.simulator.model.catalogue import load_model, shipped_models
from moesim.simulator.model.counts import (
    block_parameters,
    expert_parameters,
    flop_per_token,
    parameters_activated,
    parameters_by_component,
    parameters_mtp,
    parameters_total,
)
from moesim.simulator.model.parameters import Parameters

V3 = load_model("deepseek-v3")


def test_deepseek_v3_total_is_that_of_the_checkpoint() -> None:
    assert parameters_total(V3) == 671_026_419_200


def test_deepseek_v3_components() -> None:
    parts = parameters_by_component(V3)
    assert parts.attention / 61 / 1e6 == pytest.approx(187.105, abs=0.001)
    assert parts.dense_ffn / 3 / 1e6 == pytest.approx(396.36, abs=0.01)
    assert expert_parameters(V3) / 1e6 == pytest.approx(44.04, abs=0.01)
    assert parts.router / 58 / 1e6 == pytest.approx(1.835, abs=0.001)
    assert parts.embedding == parts.head == 129280 * 7168
    assert parameters_mtp(V3) / 1e9 == pytest.approx(11.5, rel=0.01)  # README_WEIGHTS of DeepSeek-V3


def test_deepseek_v3_flop_reproduce_the_published_mfu() -> None:
    assert flop_per_token(V3, 4096, causal=True) / 1e9 == pytest.approx(249.8, abs=0.05)
    assert flop_per_token(V3, 4096, causal=False) / 1e9 == pytest.approx(280.5, abs=0.05)
    # arXiv 2505.09343v2, table 4: MFU of MPFT from its tokens a day, against 989 TFLOP/s
    rate = 272.80e9 / 86400 / 2048
    assert rate * flop_per_token(V3, 4096, causal=True) / 989e12 == pytest.approx(0.3894, abs=0.0002)
    assert rate * flop_per_token(V3, 4096, causal=False) / 989e12 == pytest.approx(0.4373, abs=0.0002)


@pytest.mark.parametrize("name", shipped_models())
def test_blocks_add_up_to_the_model(name: str) -> None:
    shape = load_model(name)
    blocks = [b for b in blocks_of(shape) if b.layer is None or b.layer < shape.n_layers]
    total = sum((block_parameters(shape, b.kind) for b in blocks), Parameters())
    if shape.tied_embeddings:  # the table is stored once, and the first block has it
        total = total + Parameters(head=-total.head)
    assert total == parameters_by_component(shape)


def test_tied_table_counts_once_and_still_multiplies() -> None:
    untied = load_model("llama-3-8b")
    tied = untied.model_copy(update={"tied_embeddings": True})
    table = untied.vocab * untied.hidden
    assert parameters_total(untied) - parameters_total(tied) == table
    assert flop_per_token(tied, 4096, True) == flop_per_token(untied, 4096, True)
    assert parameters_activated(tied, embedding=False) == parameters_activated(untied, embedding=False)


FULL = [
    name for name in shipped_models()
    if {layer.attention.kind for layer in load_model(name).layers} <= {"gqa", "mla", "none"}
]  # fmt: skip
"""Models whose attention sees every token before, in all layers that have one."""


@given(st.sampled_from(shipped_models()), st.integers(1, 200_000), st.integers(1, 200_000))
def test_flop_grow_with_the_sequence(name: str, a: int, b: int) -> None:
    shape = load_model(name)
    short, long = sorted((a, b))
    for causal in (True, False):
        shorter, longer = (flop_per_token(shape, n, causal) for n in (short, long))
        assert shorter <= longer * (1.0 + 1e-12)


@given(st.sampled_from(FULL), st.integers(1, 200_000), st.integers(1, 200_000))
def test_causal_is_half_of_full_attention(name: str, a: int, b: int) -> None:
    shape = load_model(name)
    linear = 2 * flop_per_token(shape, a, True) - flop_per_token(shape, a, False)
    assert linear == pytest.approx(2 * flop_per_token(shape, b, True) - flop_per_token(shape, b, False))


@pytest.mark.parametrize(("name", "bytes_a_token"), [("deepseek-v3", 70_272), ("llama-3-70b", 327_680)])
def test_cache_of_a_token_is_the_published_one(name: str, bytes_a_token: int) -> None:
    # arXiv 2505.09343v2, table 1, in BF16; Qwen-2.5 72B there has the layers and heads of Llama 3 70B
    shape = load_model(name)
    for tokens in (1, 4096):
        held = sum(layer.attention.state_bytes(tokens, 2.0) for layer in shape.layers)
        assert held == tokens * bytes_a_token
