from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trace_files import launched, op, step, write

from moesim.hwmodels.errors import InputError
from moesim.simulator.predict.step import run_step
from moesim.simulator.scenario import Scenario
from moesim.simulator.trace import CLASSES, read
from moesim.simulator.trace.calls import chained
from moesim.simulator.trace.compare import compare, compare_with, compared
from moesim.simulator.trace.compare_output import bars_csv, page, perfetto, write_perfetto
from moesim.simulator.trace.events import EVENT, blank
from moesim.simulator.trace.partition import as_priced, estimated_waiting, exclusive
from moesim.simulator.trace.predicted import predicted_trace
from moesim.simulator.trace.read import fingerprints

SPANS = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 30), st.integers(0, len(CLASSES) - 1), st.integers(0, 30)),
    max_size=14,
)


@given(SPANS)
def test_every_moment_has_one_part_and_compute_goes_before_communication(spans: Any) -> None:
    events = blank(len(spans), EVENT)
    for row, (start, length, cls, _) in zip(events, spans, strict=True):
        row["start"], row["end"], row["cls"] = start, start + length, cls
    waits = np.array([min(length, wait) for _, length, _, wait in spans], np.int64)
    parts = exclusive(events, waits, True)
    covered = {t for start, length, _, _ in spans for t in range(start, start + length)}
    talking = {
        c for c, name in enumerate(CLASSES) if name in set(CLASSES[CLASSES.index("all_reduce") :][:10])
    }
    computing = {t for s, length, c, _ in spans if c not in talking for t in range(s, s + length)}
    assert sum(parts.values()) == len(covered)
    assert sum(taken for (kind, _), taken in parts.items() if kind == "compute") == len(computing)


def slower(tmp_path: Path) -> Path:
    """The step of `test_read`, its first product 30 us later and an all-reduce that ends 10 us later."""
    events = step()
    for event in events:
        if event["cat"] == "kernel" and event["name"].startswith("nccl"):
            event["dur"] = 30
    events += [op("aten::cumsum", 150, 5), *launched("strange_<b>kernel", 151, 160, 10, 9)]
    return write(tmp_path / "slow.json", events)


def test_bars_add_up_to_the_gap_and_the_unknown_kernel_is_named(tmp_path: Path) -> None:
    found = compare(read(slower(tmp_path)), read(write(tmp_path / "fast.json", step())))
    assert found.gap_ns == sum(row["difference_ns"] for row in found.bars) == 80_000
    talks = next(row for row in found.bars if row["part"] == "all_reduce")
    assert (talks["measured_ns"], talks["other_ns"]) == (20_000, 10_000)
    assert any("strange_<b>kernel" in row["kernel"] for row in found.unpriced)
    roles = [finding.role for finding in found.findings]
    assert roles == sorted(roles, key=["plan", "cause", "consequence"].index)


def test_the_page_escapes_names_and_the_csv_adds_up(tmp_path: Path) -> None:
    found = compare(read(slower(tmp_path)), read(write(tmp_path / "fast.json", step())))
    text = page(found)
    assert "strange_&lt;b&gt;kernel" in text and "strange_<b>" not in text and "src=" not in text
    rows = [line.split(",") for line in bars_csv(found).splitlines()[1:]]
    assert sum(int(row[-1]) for row in rows[:-1]) == int(rows[-1][-1])


def test_both_steps_are_adjacent_and_aligned(tmp_path: Path) -> None:
    found = compare(read(slower(tmp_path)), read(write(tmp_path / "fast.json", step())))
    write_perfetto(tmp_path / "both.json", found)
    events = json.loads((tmp_path / "both.json").read_text())["traceEvents"]
    assert events == perfetto(found)["traceEvents"]
    for pid in (1, 2):
        own = [event for event in events if event["pid"] == pid and event["ph"] == "X"]
        assert min(event["ts"] for event in own) == 0.0
        for tid in {event["tid"] for event in own}:
            row = sorted((e["ts"], e["ts"] + e["dur"]) for e in own if e["tid"] == tid)
            assert all(end <= start for (_, end), (start, _) in pairwise(row))


def test_a_prediction_beside_itself_has_no_gap_and_no_cause(small: Scenario) -> None:
    trace = predicted_trace(run_step(small), [0])
    found = compare_with(trace, small)
    assert found.gap_ns == 0 and not found.findings
    assert all(row["difference_ns"] == 0 for row in found.bars)


def test_a_plan_that_differs_is_the_first_finding(small: Scenario) -> None:
    trace = predicted_trace(run_step(small), [0])
    found = compare_with(trace, small.replace(batch={"sequences": 192}))
    assert found.findings[0].role == "plan" and "micro-batches" in found.findings[0].text
    assert "batch.sequences" in found.findings[0].check


def test_a_profile_from_the_compared_trace_is_said(small: Scenario, tmp_path: Path) -> None:
    trace, file = predicted_trace(run_step(small), [0]), write(tmp_path / "run.json", step())
    files, _ = fingerprints(file)
    origin: dict[str, Any] = {
        "gpu": "H100",
        "ranks": 1,
        "steps": 1,
        "date": "2026-11-26",
        "base": "generic-roofline",
    }
    origin |= {"files": [{"name": name, "sha256": digest} for name, digest in files]}
    profile = run_step(small).prepared.profile.model_dump(mode="json", exclude_unset=True)
    taught = tmp_path / "taught.json"
    taught.write_text(json.dumps(profile | {"name": "taught", "trace": origin}))
    found = compare_with(trace, small.replace(profile=str(taught)), path=file)
    assert "taught has its rates from run.json" in found.notes[0]
    assert not any("has its rates" in note for note in compare_with(trace, small, path=file).notes)


def test_calls_slower_than_their_equals_wait() -> None:
    assert estimated_waiting(np.array([10, 10, 15, 30]), np.array([4, 4, 4, 4])) == 25
    assert estimated_waiting(np.array([10, 30]), np.array([4, 4])) is None


@pytest.mark.parametrize(
    ("options", "words"),
    [({"step": 9}, "steps 0"), ({"rank": 5}, "has rank 0")],
)
def test_a_step_or_rank_that_is_not_there_is_refused(tmp_path: Path, options: Any, words: str) -> None:
    trace = read(write(tmp_path / "t.json", step()))
    with pytest.raises(InputError, match=words):
        compare(trace, trace, **options)


def test_settings_beside_a_trace_and_an_unknown_scenario_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json", step())
    with pytest.raises(InputError, match="is a trace"):
        compared(path, path, ["parallel.ep=2"])
    with pytest.raises(InputError, match="deepseek-v4-nowhere"):
        compared(path, "deepseek-v4-nowhere")


def test_casts_sorts_and_residuals_belong_to_the_operator_that_a_prediction_prices() -> None:
    kinds = ["cast", "rope", "cast", "gemm", "permute", "cast", "permute", "cast", "loss"]
    ops = ["aten::copy_"] * 4 + ["aten::sort", "aten::copy_", "aten::index", "aten::copy_", ""]
    assert chained(kinds, ops, [False] * 9) == [
        "rope", "rope", "rope", "gemm", "topk", "topk", "permute", "permute", "loss"
    ]  # fmt: skip
    assert chained(["gemm", "cast", "loss"], [""] * 3, [False] * 3)[1] == "cast"
    assert chained(["permute"], ["aten::sort"], [True]) == ["permute"]


def test_what_is_beside_a_prediction_has_its_classes_and_a_trace_alone_its_own(tmp_path: Path) -> None:
    names = ["elementwise_add", "fused_rms_norm", "direct_copy", "complex_mul"]
    events, ops = blank(4, EVENT), ["aten::add", "aten::_fused_rms_norm", "aten::copy_", "aten::mul"]
    for n, cls in enumerate(("elementwise", "norm", "cast", "rope")):
        events[n]["start"], events[n]["end"], events[n]["cls"] = 10 * n, 10 * n + 10, CLASSES.index(cls)
        events[n]["op"], events[n]["name"] = n, n + 4
    table = [*ops, *names]
    assert [CLASSES[n] for n in as_priced(table, events)] == ["norm", "norm", "rope", "rope"]
    table[2] = "quantise"  # a cast of its own, as FP8 has
    assert [CLASSES[n] for n in as_priced(table, events)] == ["norm", "norm", "cast", "rope"]
