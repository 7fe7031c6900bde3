"""The table of operators that a calibration measures: sizes that give back the counted bytes."""

from __future__ import annotations

from functools import lru_cache
from math import prod

import pytest

from moesim.kernels.calibrate.operators import without_piece
from moesim.simulator.predict.operator_shapes import (
    COMPILED,
    COMPILED_BYTES,
    ELEMENT_BYTES,
    Shape,
    operator_shapes,
)
from moesim.simulator.scenario import Scenario, load_scenario
from moesim.simulator.trace.parts import scenario_of

SIZES = {
    "norm": ("rows", "width"),
    "rope": ("tokens", "heads", "width"),
    "permute": ("tokens", "top_k", "hidden"),
    "topk": ("tokens", "experts"),
    "loss": ("tokens", "vocabulary"),
}
NAMED = {"copy_out": 4.0, "single_copy": 10.0, "single_divide": 16.0}
"""Bytes of an element of FSDP2's copies in FP32 and BF16."""


@lru_cache
def table() -> tuple[Shape, ...]:
    return operator_shapes(scenario(), (4096, 1024))


@lru_cache
def compiled_table() -> tuple[Shape, ...]:
    return operator_shapes(scenario().overridden(*COMPILED), (4096,))


def scenario() -> Scenario:
    return load_scenario(
        "mixtral-8x7b-64xh100",
        [
            "model=qwen3-30b-a3b",
            "parallel={ep: 8, microbatch: 2, zero_stage: 3}",
            "schedule=1f1b",
            "recompute=none",
            "software.framework=torchtitan-0.2",
            "precision={linear: bf16, parameters: fp32, loss: fp32, gradient_reduce: fp32,"
            " parameter_gather: bf16}",
            "batch.sequence_length=4096",
        ],
    )


def test_sizes_of_an_operator_times_the_bytes_of_an_element_are_its_bytes() -> None:
    of_memory = [s for s in table() if s["use"] in ELEMENT_BYTES and "piece" not in s]
    assert {shape["use"].partition("/")[0] for shape in of_memory} >= {*SIZES, "copy", "swiglu", "optimizer"}
    for shape in of_memory:
        counted = shape["use"] in ("permute/count", "permute/eager_padding")
        sides = ("elements",) if counted else SIZES.get(shape["use"].partition("/")[0], ("elements",))
        moved = prod(shape[side] for side in sides) * ELEMENT_BYTES[shape["use"]]
        assert moved == pytest.approx(shape["bytes"], rel=1e-4), shape


def test_copies_of_fsdp_are_known_by_name_and_nothing_of_a_model_is_left_out_but_foreign_kernels() -> None:
    named = [shape for shape in table() if "piece" in shape]
    assert {shape["piece"] for shape in named} == {"copy_out"}
    for shape in named:
        assert shape["elements"] * NAMED[shape["piece"]] == pytest.approx(shape["bytes"])
    assert set(without_piece(table())) == {"permute/layout", "permute/mapping"}
    assert not any(shape["use"].startswith("attention_pre_post") for shape in table())  # in the backward


def test_experts_of_one_rank_and_mla_have_pieces() -> None:
    found = {name: operator_shapes(scenario_of(name), (4096,)) for name in ("q30", "ds16")}
    named = [shape for shape in found["q30"] if "piece" in shape]
    assert {shape["piece"] for shape in named} == set(NAMED)
    for shape in named:
        assert shape["elements"] * NAMED[shape["piece"]] == pytest.approx(shape["bytes"])
    assert without_piece(found["ds16"]) == ["permute/mapping"]
    joins = [shape for shape in found["ds16"] if shape["use"].startswith("copy/eager_cat")]
    assert len(joins) == 4 and {shape["tokens"] for shape in joins} == {8192}  # keys, queries, values, latent
    for shape in joins:
        own, heads = shape["tokens"] * shape["heads"], shape["heads"]
        written = own * (shape["width"] + shape["more"]) * 2.0
        shared = own * shape["more"] * 2.0 * (1 - 1 / heads) if shape.get("shared") else 0.0
        again = own * shape["width"] * 4.0 if shape["use"].endswith("rows") else 0.0  # the latent, contiguous
        assert 2.0 * written - shared + again == pytest.approx(shape["bytes"])
    compiled = operator_shapes(scenario_of("ds16", *COMPILED), (4096,))
    assert without_piece(compiled) == ["permute/mapping"]
    for shape in (s for s in compiled if s["use"] in ("copy/broadcast", "elementwise/reduce")):
        one = shape["tokens"] * shape["width"] * 2
        assert one * (shape["heads"] + 1) == shape["bytes"]


def test_compiled_operators_have_sizes_that_give_back_their_bytes() -> None:
    compiled = [s for s in compiled_table() if "compiled" in s]
    assert {s["use"] for s in compiled} >= {*COMPILED_BYTES} - {"swiglu/backward", "swiglu/weight_backward"}
    for shape in compiled:
        cls = shape["use"].partition("/")[0]
        if cls == "permute":
            moved = (shape["rows"] + shape["tokens"]) * shape["hidden"] * 2
        else:
            moved = prod(shape[side] for side in SIZES.get(cls, ("elements",))) * COMPILED_BYTES[shape["use"]]
        assert moved == pytest.approx(shape["bytes"], rel=1e-4), shape
    assert "compiled" not in {key for shape in table() for key in shape}


def test_a_gemm_and_an_attention_have_the_sizes_of_the_model() -> None:
    gemms = {(s["use"], s["n"], s["k"], s["groups"]) for s in table() if s["use"].endswith("gemm")}
    assert {
        ("gemm", 2048, 4096, 1),
        ("grouped_gemm", 1536, 2048, 16),
        ("grouped_gemm", 2048, 768, 16),
    } <= gemms
    attention = next(s for s in table() if s["use"] == "attention_forward")
    assert (attention["heads"], attention["length"], attention["dqk"]) == (2 * 32, 4096, 128)


def test_sizes_are_those_of_the_model() -> None:
    tokens, heads = 2 * 4096, 32 + 4
    norms = {(s["use"], s["rows"], s["width"]) for s in table() if s["use"].startswith("norm/")}
    of_heads = ("norm/eager_head_forward", tokens * heads, 128)  # those of queries and keys
    assert {("norm/eager_forward", tokens, 2048), of_heads} <= norms
    ropes = {(s["heads"], s["width"]) for s in table() if s["use"] == "rope/eager_halves"}
    assert ropes == {(32, 128), (4, 128)}
    shards = {s["elements"] for s in table() if s["use"] == "copy/gather_in"}
    assert shards >= {151936 * 2048 // 64}  # of the table of tokens, over 64 GPUs
    assert {s["vocabulary"] for s in table() if s["use"] == "embedding/scatter"} == {151936}
    assert {s["vocabulary"] for s in table() if s["use"] == "loss/eager_forward"} == {151936}
    assert tokens * 8 * 768 in {s["elements"] for s in table() if s["use"] == "swiglu/eager_forward"}
    assert any("tokens" not in s and len(s) == 3 for s in table())  # named, although nothing measures it


def test_tokens_follow_the_sequence_length() -> None:
    rows = {s["tokens"] for s in table() if s["use"] == "permute/eager_expand"}
    assert rows == {2 * 4096, 2 * 1024}
