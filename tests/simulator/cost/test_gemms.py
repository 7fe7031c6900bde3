"""GEMMs as Transformer Engine calls them: measured times come back, other profiles stay as they were."""

from __future__ import annotations

from functools import lru_cache
from statistics import median
from typing import Any

import pytest
from lab import packed
from msgspec.structs import replace

from moesim.hwmodels.accelerator import load_accelerator
from moesim.hwmodels.calibration import load_profile
from moesim.simulator.cost.compute import SmContext, operator_seconds
from moesim.simulator.model.operator import ONE_SCALE, ONE_SCALE_SPLIT, Direction, Operator
from moesim.simulator.model.primitives import gemm

RESULTS = "2026-11-20-h200-layer-products.json"


@lru_cache(maxsize=1)
def measured() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = packed.read(RESULTS)["rows"]
    return rows


def operator(row: dict[str, Any]) -> Operator:
    n, k, t, fp8 = row["n"], row["k"], row["tokens"], row["dtype"] == "fp8"
    if row["kind"] == "wgrad":
        variant = ONE_SCALE if fp8 else ""
        return gemm("x", "W", n, k, t, row["dtype"], cls="wgrad_gemm", variant=variant)
    direction: Direction = "F" if row["kind"] == "forward" else "I"
    shape = (t, n, k) if direction == "F" else (t, k, n)
    variant = (ONE_SCALE if direction == "F" else ONE_SCALE_SPLIT) if fp8 else ""
    return gemm("x", direction, *shape, row["dtype"], variant=variant)


def seconds(op: Operator, profile: str, accelerator: str) -> float:
    return operator_seconds(op, load_accelerator(accelerator), load_profile(profile), SmContext()).seconds


def test_a_weight_gradient_takes_what_was_measured() -> None:
    gap = load_profile("h200-products").launch_gap
    assert gap is not None
    rows = [r for r in measured() if r["kind"] == "wgrad" and r["tokens"] >= 1024]
    assert len(rows) == 86
    for row in rows:
        took = seconds(operator(row), "h200-products", "h200-sxm") - gap.value
        assert took == pytest.approx(median(row["us"]) * 1e-6, rel=2e-3), row


def test_rows_of_2023_take_the_gemms_of_their_own_cublas() -> None:
    rows = packed.read("2026-11-26-h100-cublas-12.1.json")["rows"]
    one = next(r for r in rows if (r["kind"], r["n"], r["tokens"]) == ("forward", 12288, 12288))
    op = operator(one | {"dtype": "bf16"})
    gap = load_profile("h100-torch-2.1").launch_gap
    assert gap is not None
    took = seconds(op, "h100-torch-2.1", "h100-sxm") - gap.value
    assert took == pytest.approx(median(one["us_old"]) * 1e-6, rel=2e-3)
    assert median(r["tflop_per_s_old"] / r["tflop_per_s_new"] for r in rows) == pytest.approx(0.954, abs=1e-3)


def test_every_direction_in_fp8_reads_its_own_family() -> None:
    (forward, dgrad) = (
        next(
            r
            for r in measured()
            if (r["kind"], r["dtype"], r["n"], r["tokens"]) == (kind, "fp8", 14336, 4096)
        )
        for kind in ("forward", "dgrad")
    )
    for row in (forward, dgrad):
        rate = row["flop"] / seconds(operator(row), "h200-products", "h200-sxm")
        assert rate == pytest.approx(row["tflop_per_s"] * 1e12, rel=0.01)
    assert forward["tflop_per_s"] > dgrad["tflop_per_s"]


def test_the_buffer_of_a_weight_gradient_scales_with_the_memory() -> None:
    row = next(r for r in measured() if r["kind"] == "wgrad" and r["n"] == r["k"] == 12288)
    op = operator(row)
    bare = replace(op, accumulated_bytes=0.0)
    added = [
        seconds(op, profile, gpu) - seconds(bare, profile, gpu)
        for profile, gpu in (("h200-products", "h200-sxm"), ("h100-products", "h100-sxm"))
    ]
    assert added[0] == pytest.approx(op.accumulated_bytes / 5.04e12, rel=0.01)
    assert added[1] / added[0] == pytest.approx(4.8 / 3.35, rel=0.01)


def test_one_scale_without_a_table_is_priced_as_a_forward_product() -> None:
    weight = gemm("x", "W", 4096, 7168, 4096, "fp8", cls="wgrad_gemm", variant=ONE_SCALE)
    product = gemm("x", "F", 4096, 7168, 4096, "fp8")
    same = seconds(weight, "h100-from-h200", "h100-sxm"), seconds(product, "h100-from-h200", "h100-sxm")
    assert same[0] == pytest.approx(same[1])


def test_heads_without_alignment_run_at_their_measured_share() -> None:
    rows = packed.read("2026-11-26-h100-blocking-and-alignment.json")["rows"]
    rate = {row[2]: row[3] for row in rows if row[:2] == ["bmm", "bfloat16"]}
    even = [(rate[104][n] + rate[112][n]) / 2 for n in range(6)]
    scores = gemm("attention.scores", "F", 65536, 2048, 216, "bf16")
    aligned = seconds(scores, "a100-layers", "a100-sxm")
    for variant, columns in (("unaligned_sum", (0, 2)), ("unaligned_width", (1, 3, 4, 5))):
        share = median(rate[108][n] / even[n] for n in columns)
        took = seconds(replace(scores, variant=variant), "a100-layers", "a100-sxm")
        assert aligned / took == pytest.approx(share, rel=0.05)
