from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from moesim.hwmodels.calibration import CalibrationProfile, MeasuredCurve, Residual, load_profile
from moesim.hwmodels.errors import InputError
from moesim.simulator.cost.compute import NO_SLOW_DOWN, SlowDown
from moesim.simulator.cost.library_collectives import ring_seconds
from moesim.simulator.cost.table import TransferCost
from moesim.simulator.cost.transfers import dispatcher_transfer, engine_transfer, send_seconds
from moesim.simulator.dispatchers.protocol import (
    Call,
    EpOperation,
    LinkBytes,
    Links,
    notify_seconds,
)
from moesim.simulator.dispatchers.registry import dispatcher
from moesim.simulator.model.operator import Phase

PROFILE = load_profile("hopper-communication")
H800 = Links(200e9, 3.33e-6, 50e9, 3.7e-6, 8)
H200 = replace(H800, scale_up_bytes_per_s=450e9)
OPERATIONS: tuple[EpOperation, ...] = ("dispatch", "combine")
KERNELS = ("deepep-2025-02", "deepep-2025-04")

operations = st.sampled_from(OPERATIONS)
kernels = st.sampled_from(KERNELS)
byte_counts = st.floats(1e5, 1e9)


def value(curve_id: str, x: float) -> float:
    return PROFILE.curve(curve_id).curve.at(x).value


def transfer(
    traffic: LinkBytes,
    operation: EpOperation = "dispatch",
    *,
    sms: int = 20,
    nodes: int = 8,
    kernels: str = "deepep-2025-02",
    slow_down: SlowDown = NO_SLOW_DOWN,
    links: Links = H800,
    profile: CalibrationProfile = PROFILE,
    tokens: float = 0.0,
    row_bytes: float = 0.0,
) -> TransferCost:
    phase: Phase = "dispatch F" if operation == "dispatch" else "combine F"
    call = Call(nodes, nodes, sms, tokens, row_bytes=row_bytes, phase=phase)
    return dispatcher_transfer(dispatcher(kernels), call, traffic, links, profile, slow_down)


def moved(ib: float, nvlink: float, logical: float | None = None) -> LinkBytes:
    return LinkBytes(ib, nvlink, 0.0, ib, nvlink if logical is None else logical)


# -- expert-parallel payload -------------------------------------------------------------------------


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_slowest_of_nic_nvlink_and_sms_decides(operation: EpOperation) -> None:
    share = value(f"ep.{operation}.scale_up_fraction.deepep", 20)
    nic = transfer(moved(100e6, 1e6), operation)
    assert nic.payload_s == nic.nic_s == pytest.approx(100e6 / (0.8 * 50e9))
    nvlink = transfer(moved(1e6, 300e6), operation)
    assert nvlink.payload_s == nvlink.scale_up_s == pytest.approx(300e6 / (share * 200e9))
    few = transfer(moved(1e6, 300e6, 900e6), operation, sms=4)
    assert few.payload_s == pytest.approx(900e6 / value(f"ep.{operation}.sm_rate.deepep", 4))
    assert few.payload_s > nvlink.payload_s


def test_fewer_sms_than_were_measured_move_their_share_and_say_so() -> None:
    fewest = PROFILE.curve("ep.dispatch.sm_rate.deepep").curve.xs[0]
    assert fewest == 4.0
    few, least = (transfer(moved(1e6, 300e6, 900e6), sms=sms) for sms in (2, 4))
    assert few.payload_s == pytest.approx(2 * least.payload_s)
    assert [note for note in few.evidence.notes if "2 communication SMs are below the measured 4" in note]
    assert not least.evidence.notes


def test_inside_a_node_there_is_no_nic_and_no_nic_curve() -> None:
    time = transfer(moved(0.0, 300e6), nodes=1, kernels="nobody wrote this")
    assert time.nic_s == 0.0
    assert not any("nic" in curve for curve in time.evidence.entries)
    assert transfer(moved(1.0, 300e6)).evidence.entries == {
        "ep.dispatch.sm_rate.deepep",
        "ep.dispatch.scale_up_fraction.deepep",
        "ep.nic_fraction.deepep-2025-02",
    }


@given(
    operations,
    kernels,
    byte_counts,
    byte_counts,
    st.integers(2, 64),
    st.floats(1.0, 3.0),
    st.floats(0.0, 0.5),
)
def test_best_and_worst_bracket_the_payload(
    operation: EpOperation, kernel: str, ib: float, nvlink: float, sms: int, slowdown: float, residual: float
) -> None:
    alone = transfer(moved(ib, nvlink), operation, sms=sms, kernels=kernel)
    law = SlowDown(slowdown, residual, "a law")
    time = transfer(moved(ib, nvlink), operation, sms=sms, kernels=kernel, slow_down=law)
    assert time.evidence.entries == alone.evidence.entries | {"a law"}
    assert time.payload_s == pytest.approx(alone.payload_s * slowdown)
    assert time.best_s == alone.best_s <= alone.payload_s
    assert time.payload_s < time.worst_s
    assert time.best_s == pytest.approx(max(ib / 50e9, nvlink / 200e9))


@given(operations, byte_counts, byte_counts, st.integers(1, 120), st.integers(1, 12))
def test_more_sms_are_never_slower(
    operation: EpOperation, ib: float, nvlink: float, sms: int, more: int
) -> None:
    less, greater = (transfer(moved(ib, nvlink), operation, sms=n).payload_s for n in (sms, sms + more))
    assert greater <= less


def test_kernels_measured_as_a_whole_get_no_call_and_no_row_on_top() -> None:
    own = PROFILE.model_copy(
        update={"curves": (curve("ep.dispatch.sm_rate", [(4, 90.0), (20, 300.0)]), *PROFILE.curves)}
    )
    time = transfer(
        moved(0.0, 1e6, 1e8), nodes=1, kernels="mine", links=H200, profile=own, tokens=4096, row_bytes=7392.0
    )
    assert time.launch_s == notify_seconds(H200, 1) and time.payload_s == pytest.approx(1e8 / 300e9)


@pytest.mark.parametrize("sms", [0, -3])
def test_without_sms_there_is_no_transfer(sms: int) -> None:
    with pytest.raises(InputError, match=rf"communication\.sms={sms}: .*at least 1"):
        transfer(moved(1e6, 1e6), sms=sms)


def test_unknown_kernels_are_named_with_those_there_are() -> None:
    with pytest.raises(InputError, match=r"ep\.nic_fraction\.deepep-2031.*it has: .*ep\.nic_fraction"):
        transfer(moved(1e6, 1e6), kernels="deepep-2031")


# -- latencies, sends, rings -------------------------------------------------------------------------


def test_notify_is_two_exchanges_over_what_it_spans() -> None:
    assert notify_seconds(H800, 1) == pytest.approx(2 * 3.33e-6)
    assert notify_seconds(H800, 2) == notify_seconds(H800, 8) == pytest.approx(2 * (3.33e-6 + 3.7e-6))
    assert transfer(moved(1e6, 1e6)).launch_s == notify_seconds(H800, 8)


@given(st.floats(1e6, 1e9))
def test_a_send_is_latency_plus_bytes_over_the_link_it_uses(size: float) -> None:
    nic = value("p2p.nic_fraction", size) * 50e9
    nvlink = value("p2p.scale_up_fraction", size) * 200e9
    assert send_seconds(size, H800, PROFILE, across_nodes=True) == pytest.approx(3.7e-6 + size / nic)
    assert send_seconds(size, H800, PROFILE, across_nodes=False) == pytest.approx(3.33e-6 + size / nvlink)


LARGEST = max(y for _, y in PROFILE.curve("collective.scale_up_fraction").curve.points)
"""Share of the NVLink rate that the profile's collectives reached with large buffers."""


def test_a_large_ring_inside_a_node_moves_n_minus_1_of_n() -> None:
    """nccl-tests' bus bandwidth of an all-gather: bytes (n-1)/n over time."""
    total = 1e13
    for n in (2, 4, 8):
        bus_bandwidth = total * (n - 1) / n / ring_seconds(total, n, n, H800, PROFILE)
        assert bus_bandwidth == pytest.approx(LARGEST * 200e9, rel=1e-5)


def test_a_ring_across_nodes_uses_every_nic_of_a_node() -> None:
    total = 1e13
    one_a_node = ring_seconds(total, 4, 1, H800, PROFILE)
    assert one_a_node == pytest.approx(total * 3 / 4 / (0.8 * 50e9), rel=1e-5)
    eight_a_node = ring_seconds(total, 256, 8, H800, PROFILE)
    moved = total * 255 / 256
    # Of a GPU's eight rings seven go on over NVLink and one leaves by its NIC.
    nvlink, nic = moved * 7 / 8 / (LARGEST * 200e9), moved / 8 / (0.8 * 50e9)
    assert eight_a_node == pytest.approx(max(nvlink, nic), rel=1e-4)


def test_ring_latency_is_one_hop_a_step() -> None:
    """LL: 6.6 us to start, 0.6 a step inside a node, 1 where messages are posted, 2.7 across nodes."""
    for ranks, per_node, latency in ((8, 8, 10.8e-6), (32, 8, 42.7e-6), (4, 1, 14.7e-6)):
        assert ring_seconds(1e-3, ranks, per_node, H800, PROFILE) == pytest.approx(latency, rel=1e-6)


def test_a_group_that_does_not_fill_its_last_node_still_crosses_the_network() -> None:
    slow_nic = replace(H800, nic_bytes_per_s=1e9)
    assert ring_seconds(1e9, 12, 8, slow_nic, PROFILE) > ring_seconds(1e9, 8, 8, slow_nic, PROFILE) * 2


# -- dedicated engines -------------------------------------------------------------------------------

ENGINES = load_profile("engine-communication")
TORUS = replace(H800, curves="engine.")


def share(name: str, x: float = 8) -> float:
    return ENGINES.curve(f"engine.{name}").curve.at(x).value


def test_an_engine_takes_the_slower_of_its_two_paths() -> None:
    nic = engine_transfer(moved(100e6, 1e6), TORUS, ENGINES, nodes=8)
    assert nic.payload_s == nic.nic_s == pytest.approx(100e6 / (share("ep.nic_fraction") * 50e9))
    scale_up = engine_transfer(moved(1e6, 300e6), TORUS, ENGINES, nodes=8)
    assert scale_up.payload_s == pytest.approx(300e6 / (share("ep.scale_up_fraction") * 200e9))
    assert scale_up.best_s == pytest.approx(300e6 / 200e9)
    residual = ENGINES.curve("engine.ep.scale_up_fraction").residual.relative
    assert scale_up.worst_s == pytest.approx(scale_up.payload_s * (1 + residual))
    assert scale_up.launch_s == notify_seconds(TORUS, 8)
    assert scale_up.evidence.entries == {"engine.ep.scale_up_fraction", "engine.ep.nic_fraction"}


def test_sends_and_rings_of_an_engine_read_its_own_shares() -> None:
    assert send_seconds(1e8, TORUS, ENGINES, across_nodes=False) == pytest.approx(
        3.33e-6 + 1e8 / (share("p2p.scale_up_fraction", 1e8) * 200e9)
    )
    # The steps' latency is the same for both sizes; the rest is bytes over the engine's share.
    small, large = (ring_seconds(size, 8, 8, TORUS, ENGINES) for size in (1e9, 3e9))
    assert large - small == pytest.approx(2e9 * 7 / 8 / (share("collective.scale_up_fraction", 1e9) * 200e9))


def test_a_profile_without_engine_shares_is_named() -> None:
    with pytest.raises(
        InputError, match=r"'hopper-communication' has no curve 'engine\.ep\.scale_up_fraction'"
    ):
        engine_transfer(moved(0.0, 1e6), TORUS, PROFILE, nodes=1)


# -- generations of kernels --------------------------------------------------------------------------


def curve(id_: str, points: list[tuple[float, float]], unit: str = "GB/s") -> MeasuredCurve:
    return MeasuredCurve(
        id=id_, x_name="x", x_unit="SMs", y_name="payload", y_unit=unit, points=tuple(points), kind="assumed",
        source="this test", date="2026", residual=Residual(relative=0.1, meaning="a test"),
    )  # fmt: skip


def test_a_generation_may_have_its_own_curves_and_need_no_sm() -> None:
    own = (
        curve("ep.dispatch.sm_rate.new", [(0, 50.0), (4, 400.0)]),
        curve("ep.nic_fraction.new", [(2, 0.8), (256, 0.8)], "1"),
    )
    profile = PROFILE.model_copy(update={"curves": (*own, *PROFILE.curves)})
    traffic = moved(1e6, 300e6, 900e6)

    def rate(kernels: str, sms: int, operation: EpOperation = "dispatch") -> TransferCost:
        return transfer(traffic, operation, sms=sms, kernels=kernels, profile=profile)

    none = rate("new", 0)
    assert none.payload_s == pytest.approx(900e6 / 50e9)
    assert "ep.dispatch.sm_rate.new" in none.evidence.entries
    assert rate("new", 4).payload_s < rate("deepep-2025-02", 4).payload_s
    assert rate("deepep-2025-02", 4) == transfer(traffic, sms=4)
    assert rate("new", 4, "combine") == rate("deepep-2025-02", 4, "combine")
    assert "ep.nic_fraction.new" in rate("new", 4, "combine").evidence.entries
    with pytest.raises(InputError, match="at least 1 communication SM"):
        rate("new", 0, "combine")
