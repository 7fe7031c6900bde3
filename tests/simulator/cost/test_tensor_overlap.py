"""What frameworks expose of tensor parallelism's collectives when they cut GEMMs into pieces."""

from __future__ import annotations

from typing import get_args

import pytest

from moesim.hwmodels.calibration import LOST_BESIDE_NCCL
from moesim.simulator.cost.overlap import (
    CUTS_GEMMS,
    EdgeGemms,
    HalfCollectives,
    HalfOverlap,
    SplitGemm,
    exposed_pipelined_scatter,
    exposed_ring,
    load_methods,
    lost_beside,
    methods_note,
    methods_of,
)
from moesim.simulator.model.precision import Precision
from moesim.simulator.predict.step import run_step
from moesim.simulator.predict.summarise import summarise
from moesim.simulator.scenario import Scenario

EVEN = SplitGemm(4.0, 1.0, 1.0)
"""A GEMM that loses nothing when it is cut into four pieces."""


def test_a_ring_is_hidden_while_a_piece_travels_faster_than_the_gemm_of_a_piece() -> None:
    assert exposed_ring(EVEN, 0.9, 4, lost=0.0) == 0.0
    assert exposed_ring(EVEN, 1.5, 4, lost=0.0) == pytest.approx(3 * 0.5)


def test_cutting_costs_what_small_gemms_lose() -> None:
    cut = SplitGemm(4.0, 1.1, 1.2)
    assert exposed_ring(cut, 0.0, 4, lost=0.0) == pytest.approx(0.4)
    assert exposed_pipelined_scatter(cut, 0.0, 4, 1.0) == pytest.approx(0.8)


def test_a_pipelined_scatter_exposes_its_last_piece_and_the_sms_that_it_holds() -> None:
    assert exposed_pipelined_scatter(EVEN, 2.0, 4, 1.0) == pytest.approx(0.5)
    assert exposed_pipelined_scatter(EVEN, 2.0, 4, 1.25) == pytest.approx(0.5 + 1.0)
    assert exposed_pipelined_scatter(EVEN, 8.0, 4, 1.0) == pytest.approx(1.0 + 8.0 - 4.0)


def test_copy_engines_lose_compute_only_what_exceeds_the_share_of_the_sms() -> None:
    measured = LOST_BESIDE_NCCL.value
    assert lost_beside(measured, 24, 132) == pytest.approx(measured)
    assert lost_beside(measured, 0, 132) == pytest.approx(measured - 24 / 132)
    assert lost_beside(0.1, 0, 132) == 0.0


@pytest.mark.parametrize("overlap", ["userbuffers", "async"])
def test_long_gemms_hide_all_but_the_ends(overlap: str) -> None:
    """GEMMs 100 times as long as the collectives leave copies, the reduction and the SMs that are held."""
    methods = methods_of(overlap, "bf16", "Hopper", 8192)
    moved = HalfCollectives(1.0, 1.0, 1.0, 1.0, 0.0, 0.25, 0.25, reduce_s=0.1, copy_s=0.1)
    half = HalfOverlap(methods.attention, methods.copies, moved, 4, 132, 0.0)
    gemms = EdgeGemms(*(SplitGemm(100.0, 25.0, 25.0) for _ in range(2)))
    forward = 0.1 + (100 * 24 / 108 + 0.25 if overlap == "userbuffers" else 0.1)
    assert half.forward_s(gemms) == pytest.approx(forward)
    backward = 0.2 + (4 + 24) / 132 if overlap == "userbuffers" else 0.1 + 0.1
    assert half.backward_s(gemms, gemms) == pytest.approx(backward)


@pytest.mark.parametrize(
    ("gemms_us", "pieces_us", "copy_us", "buffer_us", "sum_us", "measured_us"),
    [
        ((58.3, 57.3), (30.4, 29.9), 26.9, 4.6, 15.3, 27.1 + 41.9),
        ((266.3, 265.6), (132.8, 133.5), 94.1, 18.9, 64.8, 42.4 + 82.0),
        ((861.8, 880.4), (433.6, 433.1), 183.8, 34.7, 129.2, 66.9 + 136.0),
    ],
)
def test_fused_operators_expose_what_two_gpus_measured(
    gemms_us: tuple[float, float],
    pieces_us: tuple[float, float],
    copy_us: float,
    buffer_us: float,
    sum_us: float,
    measured_us: float,
) -> None:
    """A gather before one GEMM and a scatter after another at widths of 2,048, 4,096 and 8,192.

    Parts alone, from lab/results/2026-11-22-h200-x2-compiled-blocks.json.xz. Measured: each fused
    operator, without the time that the same GEMM took beside a separate collective.
    """
    methods = load_methods()[1]
    moved = HalfCollectives(0.0, 0.0, 0.0, 0.0, 0.0, copy_us, copy_us, reduce_s=sum_us, copy_s=buffer_us)
    lost, barrier_us = LOST_BESIDE_NCCL.value, methods.barrier_s * 1e6
    half = HalfOverlap(methods.attention, methods.copies, moved, 2, 132, lost, barrier_us)
    first, last = (SplitGemm(*times) for times in zip(gemms_us, pieces_us, strict=True))
    exposed_us = half.forward_s(EdgeGemms(first, last))
    assert 0.83 * measured_us < exposed_us < measured_us
    without = HalfOverlap(methods.attention, methods.copies, moved, 2, 132, lost)
    assert exposed_us - without.forward_s(EdgeGemms(first, last)) > 5 * 5.0 - 1e-9


def test_every_format_of_gemms_has_methods_and_those_of_another_format_say_so() -> None:
    formats = get_args(Precision.model_fields["linear"].annotation)
    for overlap in CUTS_GEMMS:
        for linear in formats:
            assert methods_of(overlap, linear, "Blackwell", 8192).attention.gather.method == "ring"
            own = overlap == "async" or linear != "fp4"
            assert (methods_note(overlap, linear, "Blackwell", 8192) == "") == own


@pytest.mark.parametrize(
    ("linear", "card", "hidden", "methods"),
    [
        (
            "bf16",
            "Hopper",
            16384,
            ("pipeline", 8, 2, 2),
        ),  # Llama 3.1 405B: userbuffers_bf16_h100_h16384_tp8_*
        ("bf16", "Blackwell Ultra", 18432, ("pipeline", 24, 2, 8)),  # Nemotron 340B: ..._b200_h18432_tp8_*
        ("fp8", "Hopper", 18432, ("ring", 1, 2, 2)),  # none on H100: those of 405B, and a note
        ("bf16", "Hopper", 12288, ("ring", 1, 2, 4)),  # GPT-3 175B
    ],
)
def test_user_buffers_are_those_of_the_recipe_of_format_card_and_width(
    linear: str, card: str, hidden: int, methods: tuple[object, ...]
) -> None:
    half = methods_of("userbuffers", linear, card, hidden).feed_forward
    assert half.stored_input is not None
    assert (half.scatter.method, half.scatter.sms, half.stored_input.sms, half.input_gradient.sms) == methods
    assert bool(methods_note("userbuffers", linear, card, hidden)) == (card == "Hopper" and hidden == 18432)


def test_user_buffers_with_fp4_gemms_are_priced_as_an_assumption() -> None:
    """This ended with KeyError: userbuffers-fp4."""
    plan = Scenario.model_validate(
        {
            "model": "llama-3-8b",
            "cluster": {"accelerator": "b200-sxm", "nodes": 1},
            "precision": {"linear": "fp4"},
            "parallel": {"tp": 4, "sequence_parallel": True},
            "batch": {"sequences": 4, "sequence_length": 4096},
            "software": {"overlap_tensor_parallel": "userbuffers"},
        }
    )
    result = summarise(run_step(plan))
    assert any("user buffers of Transformer Engine with fp4" in note for note in result.extrapolated)
