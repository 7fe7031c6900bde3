"""Low-latency kernels: bytes, operators, buffers and refusals."""

from __future__ import annotations

import pytest

from moesim.hwmodels.errors import InputError
from moesim.simulator.dispatchers.protocol import Call, direct_bytes
from moesim.simulator.dispatchers.registry import dispatcher
from moesim.simulator.layout.dispatch_limits import check_kernels
from moesim.simulator.layout.job import resolve
from moesim.simulator.planner.frames import legal_frames
from moesim.simulator.planner.space import PlanSpace, with_defaults
from moesim.simulator.scenario import load_scenario
from moesim.simulator.trainers.megatron.arguments import dispatcher_arguments

LOW = "deepep-low-latency"


def test_every_chosen_expert_gets_its_own_copy() -> None:
    moved = direct_bytes(100.0, 8.0, 32, 8, 10.0)
    assert moved.ib_bytes + moved.nvlink_bytes + moved.local_copy_bytes == pytest.approx(100 * 8 * 10)
    assert moved.ib_bytes == pytest.approx(8000 * 24 / 32) and moved.nvlink_bytes == pytest.approx(
        8000 * 7 / 32
    )
    assert direct_bytes(100.0, 8.0, 8, 8, 10.0).ib_bytes == 0.0


def test_buffers_have_a_slot_for_every_expert_and_token() -> None:
    # LowLatencyLayout for 128 tokens of 7,168 and 288 experts: combine rows of 14,560 B, dispatch rows of
    # 14,352 B, and counts of 288 experts, rounded up to 128 B; everything twice.
    expected = 2 * (288 * 128 * 14_560 + 288 * 128 * 14_560 + 1_152)
    buffers = dispatcher(LOW).buffers(Call(8, 1, 20, 128.0, 7168, experts=288))
    assert buffers.total_bytes == pytest.approx(expected, abs=256) and buffers.nvlink_bytes == 0
    rings, group = dispatcher("uccl-ep"), Call(64, 8, 20, row=7168)
    assert rings.buffers(group) == dispatcher("deepep-2025-04").buffers(group)


def test_low_latency_kernels_refuse_what_they_are_not_written_for() -> None:
    scenario = load_scenario("deepseek-v3-2048xh800", [f"communication.kernels={LOW}"])
    shape = resolve(scenario).shape
    assert shape.moe is not None
    narrow = shape.model_copy(update={"hidden": 3072})
    many = shape.model_copy(update={"moe": shape.moe.model_copy(update={"top_k": 12})})
    for model, paired, words in (
        (narrow, False, r"compiled for rows of 2,048, .* not 3,072"),
        (many, False, "a token may choose 11 experts, not 12"),
        (shape, True, "fill the GPU, and schedule=dualpipe computes beside transfers"),
    ):
        with pytest.raises(InputError, match=words) as raised:
            check_kernels(LOW, 64, model, "dualpipe", paired)
        assert raised.value.key == "communication.kernels" and raised.value.nearest[0] == "deepep-2025-02"
        check_kernels("nccl", 64, model, "dualpipe", paired)
        check_kernels(LOW, 1, model, "dualpipe", paired)
    check_kernels(LOW, 64, shape, "1f1b", False)


def test_a_search_leaves_out_schedules_that_compute_beside_them() -> None:
    scenario = load_scenario("deepseek-v3-2048xh800")
    shape, cluster = resolve(scenario).shape, scenario.machine
    wanted = PlanSpace(tp=(1,), pp=(16,), ep=(8,), cp=(1,), schedule=("1f1b", "dualpipe"))
    space = with_defaults(wanted, scenario, shape, cluster)
    frames, refused = legal_frames(space, shape, cluster, 15360, 4096, LOW)
    assert {frame.schedule for frame in frames} == {"1f1b"}
    assert any("fill the GPU" in row.example for row in refused.rows())


def test_megatron_has_no_argument_for_them() -> None:
    scenario = load_scenario("deepseek-v3-2048xh800", [f"communication.kernels={LOW}"])
    with pytest.raises(InputError, match="Megatron-LM calls DeepEP's normal kernels"):
        dispatcher_arguments(scenario, resolve(scenario).shape, "0.20")
    normal = scenario.overridden("communication.kernels=uccl-ep")
    assert (
        dispatcher_arguments(normal, resolve(normal).shape, "0.20")["--moe-token-dispatcher-type"] == "flex"
    )
