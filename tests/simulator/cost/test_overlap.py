"""What a collective beside compute costs: nothing vanishes, nothing is counted twice."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesim.hwmodels.calibration import LOST_BESIDE_NCCL
from moesim.simulator.cost.overlap import (
    HalfCollectives,
    HalfLayerGemms,
    OverlapSlowDown,
    exposed_backward,
    exposed_behind_window,
    exposed_forward,
    exposed_overlapped,
    exposed_pipelined,
)

SECONDS = st.floats(0.0, 10.0)
RESULTS = Path(__file__).parents[3] / "benchmarks" / "gpu" / "results"
MEASURED = RESULTS / "2026-11-20-h200-x4-beside-nccl.json"


LOST = OverlapSlowDown(LOST_BESIDE_NCCL.value)
MOVED = HalfCollectives(0.2, 0.2, 0.2, 0.2)


@given(SECONDS, SECONDS, st.floats(1.0, 4.0))
def test_hiding_never_costs_more_than_standing_in_the_open(
    collective: float, compute: float, slower: float
) -> None:
    left = exposed_overlapped(collective, compute, OverlapSlowDown(LOST.compute_lost, slower))
    assert collective - compute <= left <= collective
    assert left >= exposed_overlapped(collective, compute, LOST) - 1e-12
    assert left >= LOST.compute_lost * min(collective, compute)


def test_a_collective_without_compute_is_exposed_whole() -> None:
    assert exposed_overlapped(2.0, 0.0, LOST) == 2.0


def test_a_hidden_collective_costs_what_the_gemm_loses() -> None:
    assert exposed_overlapped(1.0, 5.0, LOST) == pytest.approx(LOST.compute_lost)


def test_a_collective_slowed_by_compute_hides_less() -> None:
    """Twice as slow, a second of compute hides half a second of it; the rest runs alone at its own speed."""
    assert exposed_overlapped(2.0, 1.0, OverlapSlowDown(0.0, 2.0)) == pytest.approx(1.5)
    assert exposed_overlapped(2.0, 4.0, OverlapSlowDown(0.0, 2.0)) == 0.0


def test_the_loss_is_the_median_of_the_measured_gemms_and_its_range_is_measured() -> None:
    """Seconds lost in a window beside collectives, over the seconds that these would have taken alone."""
    rows = json.loads(MEASURED.read_text())["rows"]
    lost = {
        name: [
            (1.0 - row["alone_s"] / row["beside_s"]) * row["collective_ratio"]
            for row in rows
            if name in row["operator"]
        ]
        for name in ("product", "attention")
    }
    assert len(lost["product"]) == 14
    assert LOST_BESIDE_NCCL.value == round(statistics.median(lost["product"]), 3)
    both = [*lost["product"], *lost["attention"]]
    assert LOST_BESIDE_NCCL.range == (round(min(both), 3), round(max(both), 3))


@given(SECONDS, SECONDS, st.integers(1, 16))
def test_more_pieces_hide_no_less(collective: float, gemm: float, pieces: int) -> None:
    more, less = (exposed_pipelined(collective, gemm, n, LOST) for n in (pieces + 1, pieces))
    assert more <= less + 1e-12
    assert exposed_pipelined(collective, gemm, 1, LOST) == pytest.approx(collective)


def test_forward_hides_only_where_the_framework_cuts_it_into_pieces() -> None:
    gemms = HalfLayerGemms(1.0, 1.0, 1.0)
    open_, weights, full = (
        exposed_forward(MOVED, gemms, 8, overlap, LOST) for overlap in ("none", "weight-gradient", "full")
    )
    assert open_ == weights
    assert full < 0.4


def test_backward_gathers_the_input_again_with_sequence_parallelism() -> None:
    """Three collectives with it, of which two hide; one all-reduce without, which hides."""
    gemms = HalfLayerGemms(1.0, 1.0, 1.0)
    with_it, without = (
        exposed_backward(MOVED, gemms, 8, "weight-gradient", LOST, sequence_parallel=parallel)
        for parallel in (True, False)
    )
    assert with_it == pytest.approx(0.2 + 2 * LOST.compute_lost * 0.2)
    assert without == pytest.approx(LOST.compute_lost * 0.4)
    assert exposed_backward(MOVED, gemms, 8, "none", LOST, sequence_parallel=True) == 0.4


def test_the_last_block_of_a_reduction_has_nothing_to_hide_behind() -> None:
    assert exposed_behind_window(1.0, 100.0, 4, LOST) == pytest.approx(0.25 + LOST.compute_lost * 0.75)
    assert exposed_behind_window(1.0, 0.0, 4, LOST) == 1.0
