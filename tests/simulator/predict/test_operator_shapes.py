"""The table of operators that a calibration measures: sizes that give back the counted bytes."""

from __future__ import annotations

from functools import lru_cache
from math import prod

import pytest

from moesim.simulator.predict.operator_shapes import ELEMENT_BYTES, Shape, operator_shapes
from moesim.simulator.scenario import load_scenario

SIZES = {
    "norm": ("rows", "width"),
    "rope": ("tokens", "heads", "width"),
    "permute": ("tokens", "top_k", "hidden"),
    "topk": ("tokens", "experts"),
    "loss": ("tokens", "vocabulary"),
}


@lru_cache
def table() -> tuple[Shape, ...]:
    scenario = load_scenario(
        "mixtral-8x7b-64xh100",
        [
            "model=qwen3-30b-a3b",
            "parallel={ep: 8, microbatch: 2, zero_stage: 3}",
            "schedule=1f1b",
            "software.framework=torchtitan-0.2",
            "precision={linear: bf16, parameters: fp32, loss: fp32, gradient_reduce: fp32,"
            " parameter_gather: bf16}",
            "batch.sequence_length=4096",
        ],
    )
    return operator_shapes(scenario, (4096, 1024))


def test_sizes_of_an_operator_times_the_bytes_of_an_element_are_its_bytes() -> None:
    of_memory = [shape for shape in table() if shape["use"] in ELEMENT_BYTES]
    assert {shape["use"].partition("/")[0] for shape in of_memory} >= {*SIZES, "copy", "swiglu", "optimizer"}
    for shape in of_memory:
        sides = SIZES.get(shape["use"].partition("/")[0], ("elements",))
        moved = prod(shape[side] for side in sides) * ELEMENT_BYTES[shape["use"]]
        assert moved == pytest.approx(shape["bytes"], rel=1e-4), shape


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
