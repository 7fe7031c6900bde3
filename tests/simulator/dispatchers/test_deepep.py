"""The law by which rates of DeepEP's kernels are carried to other rows (eq. X22)."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
from lab import packed
from msgspec.structs import replace

from moesim.hwmodels.calibration import load_profile
from moesim.hwmodels.calibration_entry import Conditions
from moesim.hwmodels.errors import InputError
from moesim.simulator.cost.table import TransferCost
from moesim.simulator.cost.transfers import dispatcher_transfer
from moesim.simulator.dispatchers.protocol import (
    Call,
    EpOperation,
    LinkBytes,
    Links,
    notify_seconds,
    transfer_bytes,
)
from moesim.simulator.dispatchers.registry import dispatcher
from moesim.simulator.layout.routing import Gate, expected_targets
from moesim.simulator.model.operator import Phase

PROFILE = load_profile("hopper-communication")
MEASURED = "2026-11-25-h100-x2-row-costs.json"
H200 = Links(450e9, 3.33e-6, 50e9, 3.7e-6, 8)
OPERATIONS: tuple[EpOperation, ...] = ("dispatch", "combine")
PHASE: dict[EpOperation, Phase] = {"dispatch": "dispatch F", "combine": "combine F"}
DEEPEP = dispatcher("deepep-2025-04")


def value(curve_id: str, x: float) -> float:
    return PROFILE.curve(curve_id).curve.at(x).value


RATES = {"dispatch": 7392.0, "combine": 14336.0}
"""Row bytes with which the rates of DeepEP were measured."""


def rows_sent(
    operation: EpOperation, top_k: int, row: float, sms: int = 8, ranks: int = 8, nodes: int = 1
) -> TransferCost:
    """4,096 tokens of `row` bytes to the ranks of a random top-k of 256 experts, on H200."""
    targets = expected_targets(Gate(256, top_k), ranks * nodes, ranks)
    call = Call(ranks * nodes, nodes, sms, 4096, row_bytes=row, phase=PHASE[operation])
    links = replace(H200, ep_per_node=ranks)
    return dispatcher_transfer(DEEPEP, call, transfer_bytes(targets, 4096, row), links, PROFILE)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_measured_shape_is_priced_at_its_rate_and_after_its_call(operation: EpOperation) -> None:
    """Within a node, and for other groups at the same width."""
    row = RATES[operation]
    rate, call_s = value(f"ep.{operation}.sm_rate.deepep", 8), value(f"ep.{operation}.call_time.deepep", 512)
    time = rows_sent(operation, 8, row)
    assert time.payload_s == pytest.approx(4096 * 5.295 * row / rate, rel=2e-3)
    assert time.launch_s == pytest.approx(notify_seconds(H200, 1) + call_s)
    assert not time.evidence.notes
    assert not [entry for entry in time.evidence.entries if "token_time" in entry]
    far = rows_sent(operation, 8, row, nodes=2)
    assert not [note for note in far.evidence.notes if "the law" in note]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_other_rows_follow_the_law_and_say_so(operation: EpOperation) -> None:
    """A quarter of the width is no quarter of the time, and top-1 not a fifth of that of top-8."""
    row = RATES[operation]
    measured, narrow = (rows_sent(operation, 8, width) for width in (row, row / 3.5))
    one = rows_sent(operation, 1, row)
    assert 1 / 3.5 < narrow.payload_s / measured.payload_s < 0.7
    assert 0.35 < one.payload_s / measured.payload_s < 0.7
    for time in (narrow, one):
        assert f"ep.{operation}.token_time.deepep" in time.evidence.entries
        assert [note for note in time.evidence.notes if "measured with 8 ranks" in note and "assumed" in note]
        assert time.worst_s / time.payload_s > measured.worst_s / measured.payload_s + 0.1


@pytest.mark.parametrize("operation", OPERATIONS)
def test_above_the_measured_sms_each_goes_on_at_its_rate_up_to_the_link(operation: EpOperation) -> None:
    """DeepEP's table for B200 goes on growing from 28 to 48 SMs, as its links are twice as fast."""
    fast = replace(H200, scale_up_bytes_per_s=4500e9)  # no limit here
    targets, row = expected_targets(Gate(256, 8), 8, 8), RATES[operation]
    traffic = transfer_bytes(targets, 4096, row)
    most, more = (
        dispatcher_transfer(
            DEEPEP, Call(1, 1, sms, 4096, row_bytes=row, phase=PHASE[operation]), traffic, fast, PROFILE
        )
        for sms in (24, 48)
    )
    assert more.payload_s == pytest.approx(most.payload_s / 2)
    assert [note for note in more.evidence.notes if "48 communication SMs are above the measured 24" in note]
    limited = rows_sent(operation, 8, row, sms=48)
    share = value(f"ep.{operation}.scale_up_fraction.deepep", 48)
    assert limited.payload_s == pytest.approx(traffic.nvlink_bytes / (share * H200.scale_up_bytes_per_s))


def test_combines_of_rows_that_are_no_whole_number_of_512_bytes_take_longer() -> None:
    whole, ragged = (rows_sent("combine", 8, row).payload_s for row in (5632.0, 5760.0))
    assert ragged / whole == pytest.approx(1.88, rel=0.03)
    assert rows_sent("dispatch", 8, 5760.0).payload_s < rows_sent("dispatch", 8, 6144.0).payload_s


def measured_rows() -> list[dict[str, Any]]:
    """Rows that the SMs alone decide, as `usable` of lab/profiles/row_law.py."""
    data = packed.read(MEASURED)
    rows = [dict(zip(data["columns"], row, strict=True)) for row in data["rows"]]

    def usable(row: dict[str, Any]) -> bool:
        few = row["sms"] == 8 or (row["sms"] == 4 and row["ranks"] > 2)
        combined = row["operation"].startswith("combine")
        left_s = row["us"] * 1e-6
        link = row["ranks"] / 2 * row["rows"] / 2 * row["row_bytes"] / left_s < 200e9
        return few and link and not (combined and row["routing"].startswith("share"))

    return [r for r in rows if r["kernels"] == "deepep" and r["tokens"] == 4096 and usable(r)]


def law_us(row: dict[str, Any]) -> float:
    """Time of a measured row by the curves of the law, and the 30 or 34 us of a call of few ranks."""
    operation, ranks = row["operation"].split()[0], row["ranks"]

    def at(figure: str) -> float:
        return value(f"ep.{operation}.{figure}.deepep", ranks)

    a_token = at("token_time") + (row["row_bytes"] / at("token_rate") if operation == "combine" else 0.0)
    a_row = at("row_time") + row["row_bytes"] / at("row_rate")
    work_s = row["tokens"] * a_token + row["rows"] * a_row
    return float({"dispatch": 30.0, "combine": 34.0}[operation] + work_s / row["sms"] * 1e6)


@pytest.mark.parametrize(
    ("operation", "rows_of_it", "middle", "most"), [("dispatch", 101, 0.05, 0.12), ("combine", 48, 0.04, 0.1)]
)
def test_the_law_holds_on_the_widths_that_were_left_out_of_its_fit(
    operation: EpOperation, rows_of_it: int, middle: float, most: float
) -> None:
    left_out = [
        row
        for row in measured_rows()
        if row["operation"].startswith(operation) and row["hidden"] in (3072, 6144)
    ]
    errors = sorted(abs(law_us(row) / row["us"] - 1.0) for row in left_out)
    assert len(errors) == rows_of_it
    assert statistics.median(errors) < middle and errors[int(0.9 * rows_of_it)] < most


def test_rates_that_a_law_carries_must_say_what_they_were_measured_with() -> None:
    curves = tuple(
        c.model_copy(update={"conditions": Conditions()}) if c.id == "ep.dispatch.sm_rate.deepep" else c
        for c in PROFILE.curves
    )
    profile = PROFILE.model_copy(update={"curves": curves})
    call = Call(1, 1, 8, 4096, row_bytes=1024.0)
    with pytest.raises(
        InputError, match=r"ep\.dispatch\.sm_rate\.deepep: its conditions must state ranks, row_bytes"
    ):
        dispatcher_transfer(DEEPEP, call, LinkBytes(0.0, 1e6, 0.0, 0.0, 1e6), H200, profile)
