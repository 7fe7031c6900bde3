"""What a collective beside compute costs: nothing vanishes, nothing is counted twice."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lab import packed

from moesim.hwmodels.calibration import LOST_BESIDE_NCCL
from moesim.simulator.cost.cost_table import block_compute, block_prices
from moesim.simulator.cost.data_parallel import ChunkPlace, ChunkTimes, exposed_gathers, exposed_reductions
from moesim.simulator.cost.library_collectives import is_imported, ring_price
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
from moesim.simulator.cost.pricing import Pricer
from moesim.simulator.layout.job import resolve
from moesim.simulator.scenario import load_scenario
from moesim.simulator.scoring.mlperf import scenario_of

SECONDS = st.floats(0.0, 10.0)
MEASURED = "2026-11-20-h200-x4-beside-nccl.json"


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


def test_a_collective_slowed_by_compute_hides_less() -> None:
    """Twice as slow, a second of compute hides half a second of it; the rest runs alone at its own speed."""
    assert exposed_overlapped(2.0, 1.0, OverlapSlowDown(0.0, 2.0)) == pytest.approx(1.5)
    assert exposed_overlapped(2.0, 4.0, OverlapSlowDown(0.0, 2.0)) == 0.0


def test_the_loss_is_the_median_of_the_measured_gemms_and_its_range_is_measured() -> None:
    """Seconds lost in a window beside collectives, over the seconds that these would have taken alone."""
    rows = packed.read(MEASURED)["rows"]
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


def test_a_scatter_is_exposed_where_weight_gradients_come_later() -> None:
    later = exposed_backward(
        MOVED, HalfLayerGemms(1.0, 1.0, 0.0), 8, "weight-gradient", LOST, sequence_parallel=True
    )
    assert later == pytest.approx(0.4 + LOST.compute_lost * 0.2)
    narrow = MOVED._replace(back_scatter_s=0.05)
    gemms = HalfLayerGemms(1.0, 1.0, 1.0)
    assert exposed_backward(narrow, gemms, 8, "none", LOST, sequence_parallel=True) == pytest.approx(0.25)
    assert exposed_forward(narrow, gemms, 8, "none", LOST) == exposed_forward(MOVED, gemms, 8, "none", LOST)


def test_megatrons_ranks_form_latents_from_their_own_tokens_and_wait_for_scatters() -> None:
    """GB200 of MLPerf v6.0: TP 2, MLA with latents of 1,536, 512 and 64 columns."""
    scenario = scenario_of("gb200-512")
    own, torch = (
        Pricer(resolve(scenario.overridden(f"software.modules={name}")))
        for name in ("megatron-core", "torch")
    )
    for phase, name in (("attn F", "q_down"), ("attn I", "q_down.dgrad"), ("attn W", "q_down.wgrad")):
        flops = [
            next(op.flop for op in each.operators("moe")[phase] if op.name == name)  # type: ignore[index]
            for each in (own, torch)
        ]
        assert flops[0] == flops[1] / 2
    joined = Pricer(resolve(scenario.overridden("communication.delay_weight_gradients=false")))
    exposed = {
        name: block_compute(each, "moe", ("alone",))["moe", "attn I", "alone"].exposed_s
        for name, each in (("apart", own), ("joined", joined))
    }
    assert exposed["apart"] > exposed["joined"] + 20e-6


def test_shipped_times_of_collectives_serve_the_groups_that_were_measured() -> None:
    pricer = Pricer(resolve(scenario_of("gb200-512")))
    two, sixteen = (
        ring_price("all_gather", 2.0**29, ranks, ranks, pricer.links, pricer.profile) for ranks in (2, 16)
    )
    assert two.seconds == pytest.approx(614.5e-6, rel=1e-3)
    assert "nccl.all_gather.busbw.2-ranks-1-nodes" in two.evidence.entries
    assert not any("busbw" in entry for entry in sixteen.evidence.entries)
    entry = next(c for c in pricer.profile.curves if c.id.startswith("nccl.all_gather.busbw"))
    assert not is_imported(entry)  # so that no result warns that its plan does not read it


def test_the_last_block_of_a_reduction_has_nothing_to_hide_behind() -> None:
    assert exposed_behind_window(1.0, 100.0, 4, LOST) == pytest.approx(0.25 + LOST.compute_lost * 0.75)
    assert exposed_behind_window(1.0, 0.0, 4, LOST) == 1.0


# -- Gathers and reductions of model chunks hide behind the chunks that run meanwhile -----------

FREE = OverlapSlowDown(0.0)
FIFTH = OverlapSlowDown(0.2)


def test_one_chunk_of_the_first_rank_hides_by_buckets() -> None:
    chunks, place = ChunkTimes((1.0,), (4.0,)), ChunkPlace(0, 1, 5)
    assert exposed_gathers(chunks, place, FIFTH) == exposed_behind_window(1.0, 4.0, 5, FIFTH)
    assert exposed_reductions(chunks, place, FIFTH) == exposed_behind_window(1.0, 4.0, 5, FIFTH)


def test_later_ranks_gather_while_they_wait_for_their_first_activation() -> None:
    chunks = ChunkTimes((1.0,), (0.3,))
    exposed = [exposed_gathers(chunks, ChunkPlace(rank, 1, 1), FREE) for rank in range(5)]
    assert exposed == pytest.approx([1.0, 0.7, 0.4, 0.1, 0.0])


def test_later_ranks_reduce_their_first_chunk_after_the_last_backward() -> None:
    chunks = ChunkTimes((1.0,), (5.0,))
    assert exposed_reductions(chunks, ChunkPlace(3, 1, 4), FIFTH) == 1.0
    assert exposed_reductions(chunks, ChunkPlace(0, 1, 4), FREE) == pytest.approx(0.25)


def test_a_second_chunk_hides_behind_the_passes_of_the_first() -> None:
    """With 4 micro-batches of 0.5 s before it is needed, the second gather is hidden and costs its loss."""
    place = ChunkPlace(1, 4, 1)
    one = exposed_gathers(ChunkTimes((1.0,), (0.5,)), place, FIFTH)
    two = exposed_gathers(ChunkTimes((1.0, 1.0), (0.5, 0.5)), place, FIFTH)
    assert two == pytest.approx(one + 0.2)
    slow = exposed_gathers(ChunkTimes((1.0, 9.0), (0.5, 0.5)), place, FREE)
    assert slow == pytest.approx(0.5 + 9.0 - 2.0)  # needed at idle 0.5 + 4 x 0.5 + exposed 0.5, begun at 1.0


def test_reductions_of_later_chunks_delay_the_first_only_where_they_last_too_long() -> None:
    place = ChunkPlace(1, 4, 1)
    assert exposed_reductions(ChunkTimes((1.0, 2.0), (0.5, 0.5)), place, FREE) == pytest.approx(1.0)
    assert exposed_reductions(ChunkTimes((1.0, 3.0), (0.5, 0.5)), place, FREE) == pytest.approx(2.0)


def test_the_optimizer_of_other_chunks_hides_the_first_gather() -> None:
    chunks, place = ChunkTimes((1.0, 1.0), (0.5, 0.5)), ChunkPlace(0, 4, 1)
    without = exposed_gathers(chunks, place, FREE)
    assert exposed_gathers(chunks, place, FREE, update_s=0.4) == pytest.approx(without - 0.4)


def test_shared_experts_hide_behind_transfers_as_far_as_these_last() -> None:
    """DeepSeek-V2-Lite on 16 H100: EP8 inside a node hides less than EP16 across nodes."""
    plain = load_scenario(
        {
            "model": "deepseek-v2-lite",
            "cluster": {"accelerator": "h100-sxm", "nodes": 2},
            "parallel": {"ep": 8, "zero_stage": 1, "microbatch": 2},
            "schedule": "1f1b",
            "precision": "bf16",
            "batch": {"sequences": 32, "sequence_length": 4096},
        }
    )

    def hidden(*overrides: str) -> tuple[float, float]:
        """(seconds that hide of a layer, those of its transfers that could hide some)."""
        scenario = plain.overridden(*overrides)
        off, on = (
            block_prices(Pricer(resolve(scenario.overridden(f"communication.overlap_shared_experts={on}"))),
                         ["moe"], ("alone",))
            for on in ("false", "true")
        )  # fmt: skip
        saved = sum(price.seconds - on[0][key].seconds for key, price in off[0].items())
        return saved, sum(moved.launch_s + moved.payload_s for moved in off[1].values())

    inside, across, none = hidden(), hidden("parallel.ep=16"), hidden("parallel.ep=1")
    assert 0.0 < inside[0] <= inside[1] and inside[0] <= across[0] < across[1]
    assert none == (0.0, 0.0)
    few = hidden("communication.sms=66")  # half of the SMs move tokens
    assert few[0] <= few[1] / 2
