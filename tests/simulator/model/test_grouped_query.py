"""Windows, chunks, sinks, gates and value heads: attended keys by brute force, counts, operators, memory."""

from __future__ import annotations

from typing import Any

import pytest
from model_kinds import GPT_OSS, LONGCAT

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.validation import validate_model
from moesim.simulator.memory.activations import cached_tensors
from moesim.simulator.model.attention import GQA, ChunkedAttention, SlidingAttention
from moesim.simulator.model.attention.grouped_query import GroupedQueryAttention
from moesim.simulator.model.attention.softmax import FULL, Reach
from moesim.simulator.model.counts import attention_flop_per_token
from moesim.simulator.model.operator import Operator
from moesim.simulator.model.operators import block_operators
from moesim.simulator.model.precision import PRECISIONS
from moesim.simulator.model.shape import ModelShape

BF16 = PRECISIONS["bf16"]
PLAIN: dict[str, Any] = {"heads": 16, "kv_heads": 4, "head_dim": 64}


def counted(reach: Reach, sequence: int) -> float:
    """Keys of a query on average by looking at every pair; a position itself counts half."""
    total = 0.0
    for i in range(sequence):
        for j in range(i + 1):
            chunk = i // max(1, reach.size) == j // max(1, reach.size)
            near = chunk if reach.kind == "chunk" else i - j < reach.size
            total += (0.5 if i == j else 1.0) * (reach.kind == "full" or near)
    return total / sequence


@pytest.mark.parametrize("sequence", [1, 31, 64, 100, 257])
@pytest.mark.parametrize("size", [1, 16, 64, 100, 300])
@pytest.mark.parametrize("kind", ["window", "chunk", "chosen"])
def test_mean_keys_are_those_of_every_pair(kind: Any, size: int, sequence: int) -> None:
    reach = Reach(kind, size)
    # A window or a choice holds half a key more than the formula at its far edge.
    slack = 0.5 if kind != "chunk" and size < sequence else 1e-9
    assert reach.mean_keys(sequence) == pytest.approx(counted(reach, sequence), abs=slack)
    assert FULL.mean_keys(sequence) == pytest.approx(counted(FULL, sequence), abs=1e-9)
    assert reach.widest(sequence) == min(size, sequence)


def operators(shape: ModelShape, kind: str, sequence: int = 4096, **more: Any) -> list[Operator]:
    rows = 4096.0 * (shape.moe.routed_rows if shape.moe else 1)
    phases = block_operators(shape, kind, BF16, tokens=4096, sequence=sequence, received_rows=rows, **more)
    return [op for ops in phases.values() for op in ops]


def alike(wide: ModelShape, other: ModelShape, kind: str, sequence: int) -> bool:
    return operators(wide, kind, sequence) == operators(other, kind, sequence)


def plain_model(attention: dict[str, Any]) -> ModelShape:
    data = {**GPT_OSS, "attention": attention, "moe": None, "dense_ffn": 4096, "ffn_gated": True}
    data = {k: v for k, v in data.items() if k not in ("attentions", "attention_layers", "moe")}
    return validate_model(ModelShape, data, "model.yaml")


@pytest.mark.parametrize(("kind", "key"), [("sliding", "window"), ("chunked", "chunk")])
def test_a_window_or_chunk_of_the_whole_sequence_is_full_attention(kind: str, key: str) -> None:
    full = plain_model({"kind": "gqa", **PLAIN})
    wide = plain_model({"kind": kind, key: 4096, **PLAIN})
    narrow = plain_model({"kind": kind, key: 512, **PLAIN})
    assert alike(full, wide, "dense", 4096) and not alike(full, wide, "dense", 8192)
    assert not alike(full, narrow, "dense", 4096)
    for causal in (True, False):
        assert attention_flop_per_token(full, 4096, causal) == attention_flop_per_token(wide, 4096, causal)
        assert attention_flop_per_token(narrow, 4096, causal) < attention_flop_per_token(full, 4096, causal)
    one, other = full.layers[0].attention, narrow.layers[0].attention
    assert other.state_bytes(4096, 2.0) == one.state_bytes(512, 2.0) == 512 * 2 * 4 * 64 * 2.0
    assert other.state_bytes(100, 2.0) == one.state_bytes(100, 2.0)
    assert other.context_elements(4096) == one.context_elements(4096) / 8


def test_both_conventions_of_model_flops() -> None:
    window = SlidingAttention(window=1024, **PLAIN)
    per_key = 3 * 2 * 16 * 2 * 64
    assert window.flop_per_token(4096, causal=True) == per_key * (1024 - 1024**2 / (2 * 4096))
    assert window.flop_per_token(4096, causal=False) == per_key * 1024
    chunk = ChunkedAttention(chunk=1024, **PLAIN)
    assert chunk.flop_per_token(4096, causal=True) == per_key * 512
    assert GQA(**PLAIN).flop_per_token(4096, causal=True) == per_key * 2048


def test_scores_in_memory_are_the_whole_square_and_count_the_window() -> None:
    full, window = (
        plain_model({"kind": k, **PLAIN, **m}) for k, m in (("gqa", {}), ("sliding", {"window": 512}))
    )
    unfused = [operators(shape, "dense", unfused_attention=True) for shape in (full, window)]
    square = [sum(op.flop for op in ops if "attention." in op.name) for ops in unfused]
    assert square[0] == square[1]
    counted = [sum(op.flop - op.uncounted_flop for op in ops if "attention." in op.name) for ops in unfused]
    assert counted[1] / counted[0] == pytest.approx((512 - 512**2 / 8192) / 2048)


def test_gemms_of_heads_that_are_no_multiple_of_8_say_where_the_head_stands() -> None:
    def variants(width: int) -> dict[str, str]:
        ops = operators(
            plain_model({"kind": "gqa", **PLAIN, "head_dim": width}), "dense", unfused_attention=True
        )
        return {op.name: op.variant for op in ops if op.gemm is not None and "attention." in op.name}

    assert set(variants(64).values()) == {""}
    uneven = variants(108)
    assert {uneven[name] for name in ("attention.scores", "attention.values.dscores")} == {"unaligned_sum"}
    others = {"attention.values", "attention.values.dv", "attention.scores.dq", "attention.scores.dk"}
    assert {uneven[name] for name in others} == {"unaligned_width"}


def test_key_is_value_has_no_projection_of_values_but_keeps_them() -> None:
    plain = plain_model({"kind": "gqa", **PLAIN, "qk_norm": True})
    shared = plain_model({"kind": "gqa", **PLAIN, "qk_norm": True, "key_is_value": True})
    one, other = plain.layers[0].attention, shared.layers[0].attention
    assert isinstance(one, GroupedQueryAttention)
    assert one.parameters(2880) - other.parameters(2880) == 2880 * 4 * 64
    assert [o.name for o in other.gemm_outputs(2880)] == ["q", "k", "o_proj"]
    assert one.state_bytes(100, 2.0) == other.state_bytes(100, 2.0)
    with pytest.raises(InputError, match="v_head_dim=48 must be left out"):
        plain_model({"kind": "gqa", **PLAIN, "v_head_dim": 48, "key_is_value": True})


def test_gates_and_sinks_have_kernels_and_tensors() -> None:
    plain = plain_model({"kind": "gqa", **PLAIN})
    gated = plain_model({"kind": "gqa", **PLAIN, "output_gate": "element"})
    sinks = plain_model({"kind": "gqa", **PLAIN, "sinks": True})

    def names(shape: ModelShape, **more: Any) -> set[str]:
        return {op.name for op in operators(shape, "dense", **more)}

    assert names(gated) - names(plain) == {"attention.gate", "attention.gate.backward"}
    assert names(sinks) - names(plain) == {"attention.sinks.backward"}
    assert names(sinks, flex_attention=True) - names(plain) == {"attention.sinks", "attention.sinks.backward"}
    kept = [sum(t.bytes_per_token for t in cached_tensors(s, "dense", BF16, "none")) for s in (plain, gated)]
    assert kept[1] - kept[0] == 2 * 16 * 64 * 2, "the gates and the gated output in BF16"
    assert next(iter(gated.layers[0].attention.gemm_outputs(2880))).width == 2 * 16 * 64


def test_latent_attention_without_rotation_has_no_rotary_kernels() -> None:
    rotated, plain = (plain_model({**LONGCAT["attention"], "rotary": r}) for r in (True, False))
    lost = {op.name for op in operators(rotated, "dense")} - {op.name for op in operators(plain, "dense")}
    assert lost == {
        "rope_positions", "rope_q", "rope_k", "rope_q.backward", "rope_k.backward", "rope_q.recompute",
        "rope_k.recompute",
    }  # fmt: skip
    assert rotated.layers[0].attention.parameters(6144) == plain.layers[0].attention.parameters(6144)


def test_bytes_of_heads_follow_both_sizes() -> None:
    shape = plain_model({"kind": "gqa", "heads": 8, "kv_heads": 2, "head_dim": 192, "v_head_dim": 128})
    core = next(op for op in operators(shape, "dense") if op.name == "attention")
    assert core.bytes_read == 4096 * 2 * (8 * 192 + 2 * (192 + 128))
    assert core.bytes_written == 4096 * 2 * 8 * 128
    assert core.flop == 4096 * 8 * 4096 * (192 + 128)
