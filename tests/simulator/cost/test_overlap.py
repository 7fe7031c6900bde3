"""What a collective beside compute costs: nothing vanishes, nothing is counted twice."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesim.simulator.cost.overlap import (
    LOST_BESIDE_NCCL,
    Products,
    behind_window,
    beside,
    exposed_backward,
    exposed_forward,
    pipelined,
)

SECONDS = st.floats(0.0, 10.0)
RESULTS = Path(__file__).parents[3] / "benchmarks" / "gpu" / "results"
MEASURED = RESULTS / "2026-11-20-h200-x4-beside-nccl.json"


@given(SECONDS, SECONDS)
def test_hiding_never_costs_more_than_standing_in_the_open(collective: float, compute: float) -> None:
    left = beside(collective, compute)
    assert collective - compute <= left <= collective
    assert left >= LOST_BESIDE_NCCL.value * min(collective, compute)


def test_a_collective_without_compute_is_exposed_whole() -> None:
    assert beside(2.0, 0.0) == 2.0


def test_a_hidden_collective_costs_what_the_product_loses() -> None:
    assert beside(1.0, 5.0) == pytest.approx(LOST_BESIDE_NCCL.value)


def test_the_loss_is_the_median_of_the_measured_products() -> None:
    """Seconds lost in a window beside collectives, over the seconds that these would have taken alone."""
    rows = [row for row in json.loads(MEASURED.read_text())["rows"] if "product" in row["operator"]]
    lost = [(1.0 - row["alone_s"] / row["beside_s"]) * row["collective_ratio"] for row in rows]
    assert len(lost) == 14
    assert LOST_BESIDE_NCCL.value == round(statistics.median(lost), 3)


@given(SECONDS, SECONDS, st.integers(1, 16))
def test_more_pieces_hide_no_less(collective: float, product: float, pieces: int) -> None:
    assert pipelined(collective, product, pieces + 1) <= pipelined(collective, product, pieces) + 1e-12
    assert pipelined(collective, product, 1) == pytest.approx(collective)


def test_forward_hides_only_where_the_framework_cuts_it_into_pieces() -> None:
    products = Products(1.0, 1.0, 1.0)
    assert exposed_forward(0.2, products, 8, "none") == exposed_forward(0.2, products, 8, "weight-gradient")
    assert exposed_forward(0.2, products, 8, "full") < 0.4


def test_backward_gathers_the_input_again_with_sequence_parallelism() -> None:
    """Three collectives with it, of which two hide; one all-reduce without, which hides."""
    products = Products(1.0, 1.0, 1.0)
    lost = LOST_BESIDE_NCCL.value
    with_it = exposed_backward(0.2, products, 8, "weight-gradient", sequence_parallel=True)
    without = exposed_backward(0.2, products, 8, "weight-gradient", sequence_parallel=False)
    assert with_it == pytest.approx(0.2 + 2 * lost * 0.2)
    assert without == pytest.approx(lost * 0.4)
    assert exposed_backward(0.2, products, 8, "none", sequence_parallel=True) == 0.4


def test_the_last_block_of_a_reduction_has_nothing_to_hide_behind() -> None:
    assert behind_window(1.0, 100.0, 4) == pytest.approx(0.25 + LOST_BESIDE_NCCL.value * 0.75)
    assert behind_window(1.0, 0.0, 4) == 1.0
