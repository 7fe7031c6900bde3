"""Pieces of data-parallel collectives, small all-reduces, and passes over the gradients."""

from __future__ import annotations

import pytest

from moesim.simulator.cost.data_parallel import Pieces, data_parallel, pieces_of
from moesim.simulator.cost.layer_collectives import amax_exposed_s
from moesim.simulator.cost.library_collectives import small_all_reduce_s
from moesim.simulator.cost.pricing import Pricer
from moesim.simulator.cost.table import PhaseCost
from moesim.simulator.layout.job import resolve
from moesim.simulator.scenario import Scenario

US = 1e-6


def pricer_of(scenario: Scenario, *overrides: str) -> Pricer:
    return Pricer(resolve(scenario.overridden(*overrides)))


def test_a_small_all_reduce_is_a_tree_of_nccls_latencies() -> None:
    """2,048 GPUs: 6.8 us, 14 steps of 0.6 us in the nodes and 16 of 5 us between 256 of them."""
    assert small_all_reduce_s(2048, 8) == pytest.approx((6.8 + 14 * 0.6 + 16 * 5.0) * US)
    assert small_all_reduce_s(1, 8) == 0.0
    sizes = [small_all_reduce_s(8 * nodes, 8) for nodes in (1, 2, 8, 128, 1344)]
    assert sizes == sorted(sizes) and len(set(sizes)) == len(sizes)


def test_pieces_follow_the_bucket_of_the_trainer(small: Scenario) -> None:
    """Sixteen replicas twice: 1 M for each is below 40 M parameters, so buckets hold 40 M."""
    kinds, held = ("moe", "moe"), (1000e6, 100e6)
    overlap = "software.overlap_data_parallel=true"
    megatron = pricer_of(small, overlap, "software.data_parallel_buckets=megatron")
    assert pieces_of(megatron, kinds, *held, 2) == Pieces(25, 2)
    stated = pricer_of(small, overlap, "software.bucket_parameters=500000000")
    assert pieces_of(stated, kinds, *held, 2) == Pieces(2, 1)
    assert pieces_of(pricer_of(small, overlap), kinds, *held, 2) == Pieces(2, 2)
    assert pieces_of(pricer_of(small), kinds, *held, 2) == Pieces(1, 1)


def test_every_piece_pays_the_latency_of_its_ring(small: Scenario) -> None:
    pricer = pricer_of(small)
    whole = data_parallel(pricer, "reduce_scatter", 1e9, 0.0, 2).seconds
    tenth = data_parallel(pricer, "reduce_scatter", 1e8, 0.0, 2).seconds
    assert data_parallel(pricer, "reduce_scatter", 1e9, 0.0, 2, Pieces(10, 1)).seconds == pytest.approx(
        10 * tenth
    )
    assert 10 * tenth > whole


def test_only_delayed_scaling_waits_for_largest_elements(small: Scenario) -> None:
    prices = {(phase, "alone"): PhaseCost(1e-3) for phase in ("attn F", "mlp F", "mlp I", "attn I")}
    tensor = "precision={linear: fp8, scaling: tensor}"
    every = "software.amax_reduction=data-parallel"

    def seconds(*overrides: str) -> float:
        return sum(amax_exposed_s(pricer_of(small, *overrides), "moe", prices).values())  # type: ignore[arg-type]

    assert seconds(tensor) == 0.0
    assert seconds(every) == 0.0  # tiles have scales of their own
    assert seconds(tensor, every, "software.fp8_scales=current") == 0.0
    own = seconds(tensor, every, "variation.jitter_cv=0")
    assert 0.0 < own < seconds(tensor, every, "variation.jitter_cv=0.02")
