"""Prices and operators of the dispatchers that are not DeepEP's."""

from __future__ import annotations

from functools import lru_cache, partial

import pytest

from moesim.hwmodels.calibration import load_profile
from moesim.hwmodels.errors import InputError
from moesim.simulator.cost.library_collectives import ring_seconds
from moesim.simulator.cost.pricing import Pricer
from moesim.simulator.cost.transfers import dispatcher_transfer, expert_transfer
from moesim.simulator.dispatchers.protocol import Call, Links, notify_seconds
from moesim.simulator.dispatchers.registry import dispatcher
from moesim.simulator.layout.dispatch_limits import check_dispatcher
from moesim.simulator.layout.job import resolve
from moesim.simulator.layout.routing import Gate, expected_targets
from moesim.simulator.model.operator import Operator, Phase
from moesim.simulator.scenario import load_scenario

PROFILE = load_profile("hopper-communication")
RACK = Links(900e9, 3.33e-6, 50e9, 3.7e-6, 64, ep_per_node=32)
TOKENS, HIDDEN = 4096.0, 7168


def curve(curve_id: str, x: float) -> float:
    return PROFILE.curve(curve_id).curve.at(x).value


@lru_cache(maxsize=8)
def pricer(*overrides: str) -> Pricer:
    scenario = load_scenario(
        "deepseek-v3-2048xh800",
        [
            "cluster={node: hgx-h800, nodes: 8, network: mpft-ib-400g}",
            "parallel={pp: 4, ep: 16, zero_stage: 1}",
            "stages.blocks=[embedding moe*2, moe*2, moe*2, moe*2 head]",
            "batch.sequences=128",
            *overrides,
        ],
    )
    return Pricer(resolve(scenario))


def operators(phase: Phase, *overrides: str) -> dict[str, Operator]:
    return {op.name: op for op in pricer(*overrides).operators("moe")[phase]}


# -- Hybrid-EP ---------------------------------------------------------------------------------------


def in_a_rack(sms: int, row: float, phase: Phase = "combine B") -> tuple[float, float]:
    """(payload, launch) of a dispatch inside one domain of 32 GPUs."""
    targets = partial(expected_targets, Gate(256, 8), 32, 32)
    call = Call(32, 1, sms, TOKENS, row_bytes=row, experts=256, targets=targets, phase=phase)
    kind = dispatcher("hybridep")
    time = dispatcher_transfer(kind, call, kind.traffic(call), RACK, PROFILE)
    assert time.nic_s == time.nic_bytes == 0.0
    return time.payload_s, time.launch_s


def test_a_domain_is_bound_by_its_links_with_enough_sms_and_by_its_sms_with_few() -> None:
    row = 2.0 * HIDDEN
    rows = TOKENS * expected_targets(Gate(256, 8), 32, 32).distinct_gpus
    linked = rows * 31 / 32 * row / (curve("ep.dispatch.scale_up_fraction.hybridep", 32) * 900e9)
    assert in_a_rack(32, row)[0] == pytest.approx(linked)
    moved = rows * (row / curve("ep.dispatch.sm_rate.hybridep", 4) + 67e-9 / 4)
    assert in_a_rack(4, row)[0] == pytest.approx(moved)
    # A narrow row costs more a byte, because a part of its time does not shrink with it.
    assert in_a_rack(4, row / 4)[0] > in_a_rack(4, row)[0] / 4


def test_a_forward_dispatch_gathers_the_routing_map_of_all_ranks_first() -> None:
    size = TOKENS * 256
    _, cached = in_a_rack(16, 2.0 * HIDDEN)
    _, anew = in_a_rack(16, 2.0 * HIDDEN, "dispatch F")
    assert cached == pytest.approx(notify_seconds(RACK, 1) + curve("ep.dispatch.call_time.hybridep", 32))
    assert anew - cached == pytest.approx(ring_seconds(size * 32, 32, 32, RACK, PROFILE))


def test_across_domains_the_network_takes_each_row_once_for_each_domain() -> None:
    hybrid, deepep = (pricer(f"communication.kernels={name}") for name in ("hybridep", "deepep-2025-04"))
    one, two = (expert_transfer(each, "combine B", "alone") for each in (hybrid, deepep))
    assert (one.nic_bytes, one.scale_up_bytes) == (two.nic_bytes, two.scale_up_bytes)
    assert one.nic_s == pytest.approx(one.nic_bytes / (0.676 * 50e9))
    again, first = (expert_transfer(hybrid, phase, "alone") for phase in ("combine B", "dispatch F"))
    assert first.launch_s > again.launch_s + 50e-6 and first.payload_s == again.payload_s


STREAM: tuple[tuple[Phase, Phase, str], ...] = (
    ("mlp F", "dispatch F", "experts.expand"),
    ("mlp F", "combine F", "experts.reduce"),
    ("mlp I", "combine B", "experts.expand_gradient"),
    ("mlp I", "dispatch B", "experts.reduce_gradient"),
)


def test_hybrid_ep_permutes_on_the_stream_of_its_transfers() -> None:
    key = "communication.kernels=hybridep"
    for source, target, name in STREAM:
        compute = operators(source, key, "communication.permutation_stream=compute")
        assert name in compute and name not in operators(source, key)
        assert operators(target, key)[name] == compute[name]
        fused = (key, "communication.fused_permutation=true")
        assert name not in {**operators(source, *fused), **operators(target, *fused)}
        assert name in operators(source, "communication.kernels=deepep-2025-04")
    # The scan that makes the layout writes the order of the rows too.
    assert not {"experts.count", "experts.mapping"} & set(operators("mlp F", key))
    scan = operators("dispatch F", key)["dispatch.layout"]
    assert scan.bytes_read == 4096 * 256 * 16


def test_a_permutation_beside_compute_has_the_sms_that_gemms_leave() -> None:
    key = ("communication.kernels=hybridep", "precision=bf16", "profile=h800-from-h200")
    few, many = (pricer(*key, f"communication.sms={sms}") for sms in (4, 32))
    op = operators("combine F", *key)["experts.reduce"]
    moved = op.bytes_read + op.bytes_written
    alone = few.operator_costs("moe", "combine F", "alone")[0].seconds
    slow, fast = (each.operator_costs("moe", "combine F", "overlapped")[0] for each in (few, many))
    assert slow.seconds == pytest.approx(moved / (4 * 96.0e9), rel=0.01) and slow.seconds > 2 * alone
    assert slow.curve_ids[0] == "copy.local.sm_rate"
    assert alone <= fast.seconds < slow.seconds / 2
    assert few.operator_costs("moe", "mlp F", "alone") == many.operator_costs("moe", "mlp F", "alone")


def test_permutation_on_the_stream_needs_a_dispatcher_that_does_it() -> None:
    job = pricer("communication.kernels=nccl", "communication.permutation_stream=communication")
    with pytest.raises(InputError, match=r"permutation_stream=communication.*use compute") as error:
        check_dispatcher(job.scenario, job.cluster, job.layout)
    assert error.value.nearest == ("compute",)


def test_rows_padded_by_the_permutation_need_no_kernel_that_pads() -> None:
    more = ("software.pad_expert_rows=true", "precision={linear: fp8}")
    assert "experts.pad" in operators("mlp F", "communication.kernels=deepep-2025-04", *more)
    assert "experts.pad" not in operators("mlp F", "communication.kernels=hybridep", *more)


# -- NCCL --------------------------------------------------------------------------------------------


def test_an_all_to_all_permutes_before_and_sorts_behind() -> None:
    deepep, nccl = (
        operators("mlp F", f"communication.kernels={name}", "precision=bf16")
        for name in ("deepep-2025-04", "nccl")
    )
    row = 2.0 * HIDDEN
    assert nccl["experts.expand"].bytes_read == pytest.approx(4096 * row)
    assert deepep["experts.expand"].bytes_read > nccl["experts.expand"].bytes_read
    for name in ("experts.sort", "experts.unsort"):
        assert name not in deepep
        assert nccl[name].bytes_read == nccl[name].bytes_written == pytest.approx(8 * 4096 * row)
    one_expert = dispatcher("nccl").operators(
        {"mlp F": tuple(deepep.values())}, Call(16, 2, 20, choices=8, local_experts=1)
    )
    assert not any("sort" in op.name for op in one_expert["mlp F"])  # what arrives is in order


def test_small_exchanges_go_with_the_tokens() -> None:
    times = {
        phase: expert_transfer(pricer("communication.kernels=nccl"), phase, "alone").launch_s
        for phase in ("dispatch F", "combine F", "combine B", "dispatch B")
    }
    call_s = curve("nccl.all_to_all.call_time", 16)
    assert times["combine F"] == times["combine B"]
    assert times["dispatch F"] - times["combine F"] == pytest.approx(2 * call_s)
    assert times["dispatch B"] - times["combine F"] == pytest.approx(call_s)


def test_an_all_gather_moves_every_token_to_every_rank() -> None:
    gathered = pricer("communication.kernels=nccl-allgather", "precision=bf16")
    time = expert_transfer(gathered, "dispatch F", "alone")
    total = 16 * 4096 * 2.0 * HIDDEN
    assert time.scale_up_bytes == pytest.approx(total * 15 / 16)
    assert time.payload_s == pytest.approx(ring_seconds(total, 16, 8, gathered.links, gathered.profile))
    names = operators("mlp F", "communication.kernels=nccl-allgather", "precision=bf16")
    rows = names["experts.expand"].bytes_written
    assert names["experts.expand"].bytes_read == rows
    assert names["experts.reduce"].bytes_written == pytest.approx(rows + total)
