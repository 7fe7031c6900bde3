"""Rates of windows, flex_attention and narrow or wide heads, against measured times outside the curves."""

from __future__ import annotations

import statistics
from functools import cache
from typing import Any

import pytest
from lab import packed
from msgspec.structs import replace

from moesim.hwmodels.accelerator import load_accelerator
from moesim.hwmodels.calibration import CalibrationProfile, load_profile
from moesim.simulator.cost.compute import OperatorCost, SmContext, operator_seconds
from moesim.simulator.model.attention.softmax import (
    HeadSizes,
    Reach,
    core_backward,
    core_forward,
    sink_backward,
    sink_forward,
)
from moesim.simulator.model.operator import Operator, Work

MEASURED = "2026-11-22-h200-windowed-attention.json"
Row = dict[str, Any]


@cache
def rows(part: str) -> tuple[Row, ...]:
    every = packed.read(MEASURED)["rows"]
    return tuple(r for r in every if r["part"] == part and "error" not in r and r["sequence"] > 1024)


def left_out(row: Row) -> bool:
    """As `held_out` of lab/profiles/window_curves.py, which made the curves without these shapes."""
    plain = row["heads"] == row["kv_heads"] or row["sinks"] or row["reach"] == "chunk"
    return bool(plain or row["size"] == 512 or (row["reach"] == "full" and row["sequence"] == 16384))


def work(row: Row) -> Work:
    tokens = float(row["batch"] * row["sequence"])
    return Work(
        hidden=4096, fp8=False, tokens=tokens, sequence=row["sequence"], tp=1, ep=1, rows=tokens,
        received_tokens=tokens, recompute="none", flex=row["part"] == "flex",
    )  # fmt: skip


def operators(row: Row) -> tuple[list[Operator], list[Operator]]:
    w, sizes = work(row), HeadSizes(row["heads"], row["kv_heads"], row["dim"], row["dim"])
    reach, heads = Reach(row["reach"], row["size"]), row["heads"] * row["sinks"]
    width = row["heads"] * row["dim"]
    forward = [*core_forward(w, sizes, reach), *sink_forward(w, heads, width)]
    return forward, [*sink_backward(w, heads, width), *core_backward(w, sizes, reach)]


def price(op: Operator, profile: str | CalibrationProfile = "h200-measured") -> OperatorCost:
    loaded = load_profile(profile) if isinstance(profile, str) else profile
    return operator_seconds(op, load_accelerator("h200-sxm"), loaded, SmContext())


def seconds(ops: list[Operator]) -> float:
    gap = load_profile("h200-measured").launch_gap
    assert gap is not None
    return sum(price(op).seconds - gap.value * op.launches for op in ops)


@pytest.mark.parametrize(("part", "median", "most"), [("cudnn", 0.04, 0.09), ("flex", 0.04, 0.15)])
def test_times_of_shapes_that_are_not_in_the_curves(part: str, median: float, most: float) -> None:
    errors = []
    for row in filter(left_out, rows(part)):
        if part == "cudnn" and row["reach"] == "full" and row["dim"] == 128:
            continue  # full attention of common heads has older curves of its own
        for ops, way in zip(operators(row), ("forward", "backward"), strict=True):
            errors.append(abs(seconds(ops) / (row[way]["us"] * 1e-6) - 1.0))
    assert len(errors) > 25
    assert statistics.median(errors) < median and max(errors) < most


def case(part: str, **wanted: Any) -> Row:
    return next(r for r in rows(part) if all(r[k] == v for k, v in wanted.items()))


def test_full_attention_of_common_heads_keeps_its_curve() -> None:
    (core,) = operators(case("cudnn", dim=128, sequence=8192, reach="full"))[0]
    assert core.variant == "" and price(core).curve_ids == ("h200-measured.attention_forward",)


@pytest.mark.parametrize(
    ("part", "wanted", "variant"),
    [
        ("cudnn", {"dim": 64, "reach": "full"}, "64"),
        ("cudnn", {"dim": 256, "reach": "window"}, "window_256"),
        ("flex", {"dim": 128, "reach": "full"}, "flex"),
        ("flex", {"dim": 64, "reach": "window"}, "flex_window_64"),
        ("flex", {"dim": 128, "reach": "chunk"}, "flex"),
    ],
)
def test_kernels_are_priced_by_their_own_curves(part: str, wanted: dict[str, Any], variant: str) -> None:
    for ops in operators(case(part, **wanted)):
        core = next(op for op in ops if op.cls in ("attention_forward", "attention_backward"))
        assert core.variant == variant
        cost = price(core)
        assert cost.curve_ids[0].startswith("h200-windowed-attention.") and not cost.assumptions
        assert cost.best_seconds <= cost.seconds <= cost.worst_seconds


def without(profile: CalibrationProfile, curves: tuple[str, ...], priors: bool) -> CalibrationProfile:
    kept = tuple(c for c in profile.curves if c.id.removeprefix("h200-windowed-attention.") not in curves)
    own = tuple(p for p in profile.priors if priors or not any("/" in use for use in p.used_for))
    return profile.model_copy(update={"curves": kept, "priors": own})


def test_a_window_is_never_priced_as_full_attention_in_silence() -> None:
    profile = load_profile("h200-measured")
    core = operators(case("cudnn", dim=64, reach="window", size=128))[0][0]
    measured = price(core, profile)
    other_heads = price(core, without(profile, ("forward.window_64",), True))
    assert any("other heads" in note for note in other_heads.assumptions)
    assumed = price(core, without(profile, ("forward.window_64", "forward.window"), True))
    assert assumed.curve_ids == ("generic-priors.attention_window_forward",) and assumed.assumptions
    assert assumed.best_seconds < measured.seconds < assumed.worst_seconds
    full = price(core, without(profile, ("forward.window_64", "forward.window"), False))
    assert any("full causal attention of another kernel" in note for note in full.assumptions)
    generic = load_profile("generic-roofline")
    other_gpu = operator_seconds(core, load_accelerator("mi300x"), generic, SmContext())
    assert any("attention_window_forward" in note for note in other_gpu.assumptions)


@pytest.mark.parametrize("dim", [64, 256, 512])
def test_heads_that_were_not_measured_are_said(dim: int) -> None:
    """They have the rate of heads that were, and the price names them; measured ones have no such note."""
    profile = load_profile("h200-measured")
    full = [c for c in profile.curves if not any("attention_forward/" in use for use in c.used_for)]
    (core,) = core_forward(work(rows("cudnn")[0]), HeadSizes(16, 4, dim, dim))
    notes = [note for note in price(core, profile).assumptions if "other heads" in note]
    assert bool(notes) == (dim == 512)
    bare = profile.model_copy(update={"curves": tuple(full)})
    assert [note for note in price(core, bare).assumptions if "other heads" in note]


def test_ring_attention_reads_its_rate_at_a_piece_and_joins_the_pieces() -> None:
    whole = Work(
        hidden=4096, fp8=False, tokens=4096.0, sequence=8192, tp=1, ep=1, rows=0.0, received_tokens=0.0,
        recompute="none",
    )  # fmt: skip
    sizes, pieces = HeadSizes(32, 8, 128, 128), replace(whole, pieces=4)
    core, joined = core_forward(pieces, sizes)
    assert [op.name for op in core_forward(whole, sizes)] == ["attention"]
    assert core.gemm is not None and core.gemm.n == 2048 and core.launches == 4
    assert core.flop == core_forward(whole, sizes)[0].flop
    out = 4096 * 32 * 128 * 2.0
    assert (joined.bytes_read, joined.bytes_written, joined.launches) == (7 * out, 4 * out, 7)
    backward = core_backward(pieces, sizes)[-1]
    assert backward.bytes_written == 4 * (out + 4096 * 8 * 256 * 2.0)
    assert price(core).seconds > price(core_forward(whole, sizes)[0]).seconds
