"""A calibration without a GPU: a synthetic machine with known laws must come back out of its profile."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from synthetic_machine import (
    ALL,
    QUICK_TASKS,
    TRUTH,
    Synthetic,
    interrupted,
    machine,
    run,
    saturate,
)

from moesim.hwmodels.accelerator import load_accelerator
from moesim.hwmodels.calibration import CalibrationProfile, load_profile
from moesim.hwmodels.drift import compare
from moesim.hwmodels.errors import InputError
from moesim.kernels.calibrate import Options, build_plan, calibrate, statements, transfer
from moesim.kernels.calibrate.protocol import (
    Facts,
    Sample,
    TimedRow,
    TimingTask,
    row_of,
)


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> CalibrationProfile:
    return run(tmp_path_factory.mktemp("full") / "h200-8.yaml")[0]


# --- the profile says what the machine does ---


def test_expert_parallel_curves_come_back(full: CalibrationProfile) -> None:
    for operation, row in (("dispatch", 7392), ("combine", 14336)):
        curve = full.curve(f"ep.{operation}.sm_rate")
        size = 4096 * 5.295 * row
        for n in (4, 8, 20):
            expected = size / (40e-6 + size / saturate(n, 20e9, 350e9))
            assert curve.curve.at(n).value == pytest.approx(expected, rel=0.02)
        share = full.curve(f"ep.{operation}.scale_up_fraction").curve.at(20)
        assert not share.extrapolated
        assert share.value == pytest.approx(curve.curve.at(20).value * 7 / 8 / 450e9, rel=1e-3)
        assert curve.residual.relative < 0.05 and "left-out median" in (curve.note or "")
        relay = full.curve(f"ep.forward.{operation}.sm_rate")
        assert "2 virtual nodes of 4" in relay.source
        assert relay.curve.at(4).value == pytest.approx(60e9, rel=0.1)  # latency included


def test_sends_and_collectives_are_shares_of_the_nominal_link(full: CalibrationProfile) -> None:
    assert full.curve("p2p.scale_up_fraction").curve.at(58e6).value == pytest.approx(370 / 450, rel=0.03)
    at = full.curve("collective.scale_up_fraction").curve.at(256 * 2**20).value
    assert at == pytest.approx(340 / 450, rel=0.03)
    size = 8 * 2**20 * 7 / 8
    at = full.curve("collective.scale_up_fraction").curve.at(2**20).value
    assert at == pytest.approx(size / (30e-6 + size / 340e9) / 450e9, rel=0.03)
    assert full.curve("nccl.all_gather.beside_compute").curve.at(2**28).value == pytest.approx(2.0, rel=0.03)
    assert full.curve("copy.push.sm_rate").note is not None


def test_products_attention_and_memory_rates(full: CalibrationProfile) -> None:
    tables = {(t.cls, t.dtype): t for t in full.gemm_tables}
    assert tables["gemm", "bf16"].points[0][4] == pytest.approx(750, rel=0.02)
    assert tables["gemm", "fp8"].sm_aware and not tables["gemm", "bf16"].sm_aware
    assert tables["grouped_gemm", "fp8"].points[0][3] == 8
    for curve in full.curves:
        if curve.used_for in (("attention_forward",), ("attention_backward",)):
            assert curve.curve.at(4096).value == pytest.approx(580e12, rel=0.02)
        if "copy" in curve.used_for:
            assert curve.curve.at(2**31).value == pytest.approx(3.9e12, rel=0.02)
    assert {u for c in full.curves for u in c.used_for} >= {"cast", "copy", "attention_forward"}


def test_every_law_is_measured_and_monotone(full: CalibrationProfile) -> None:
    laws = {law.group: law for law in full.laws}
    assert set(laws) == {"gemm_sm_aware", "gemm_sm_unaware", "attention", "memory_bound", "communication"}
    assert laws["gemm_sm_aware"].curve.at(20).value == pytest.approx(1.18, rel=0.01)
    assert laws["gemm_sm_unaware"].curve.at(20).value == pytest.approx(1.36, rel=0.01)
    assert laws["attention"].curve.at(20).value == pytest.approx(1.24, rel=0.01)
    assert laws["memory_bound"].curve.at(20).value == pytest.approx(1.12, rel=0.01)
    assert laws["communication"].curve.at(8).value == pytest.approx(1.5, rel=0.01)
    assert "whichever is best" in (laws["gemm_sm_aware"].note or "")
    for group, law in laws.items():
        values = [y for _, y in law.points]
        assert values == sorted(values, reverse=group == "communication")


def test_entries_carry_the_conditions_of_the_run(full: CalibrationProfile) -> None:
    for curve in load_profile("hopper-communication").curves:
        assert full.curve(curve.id)  # what the simulator reads, carried where it was not measured
    assert "carried unchanged" in (full.curve("p2p.nic_fraction").note or "")
    assert full.curve("p2p.nic_fraction").kind == "published"
    entry = full.curve("copy.push.sm_rate")
    for part in ("8x NVIDIA H200", "driver 580.159.04", "CUDA 13.0", "kernels ", "moesim calibrate"):
        assert part in entry.source
    clocks = entry.conditions.clocks or ""
    assert "at most 1980 MHz" in clocks and "1725 MHz under BF16 products at 690 W" in clocks
    assert entry.date == "2026-11-20"
    assert "between nodes" in full.evidence


# --- plans ---


@pytest.mark.parametrize("gpus", [1, 2, 3, 8])
@pytest.mark.parametrize("quick", [True, False])
def test_plans_fit_their_time_on_any_number_of_gpus(gpus: int, quick: bool) -> None:
    plan = build_plan(Facts(gpus, ALL), quick=quick)
    assert plan.estimate_s < plan.budget_s < (120 if quick else 360)
    assert len({task.key for task in plan.tasks}) == len(plan.tasks)
    names = {m.name for m in plan.measurements}
    assert ("copy" in names) == (gpus > 1) and "gemm" in names
    assert any("between nodes" in text for text in plan.not_measured)
    for task in plan.tasks:
        ranks, peer = (int(task.parameters.get(key, 1)) for key in ("ranks", "peer"))
        assert ranks <= gpus and peer < max(2, gpus)


def test_impossible_or_unknown_plans_are_input_errors() -> None:
    plan = build_plan(Facts(8, frozenset({"cupy"})))
    assert {m.name for m in plan.measurements} == set(TRUTH) - {
        "gemm",
        "attention",
        "interference",
        "nccl",
        "operators",
        "host",
        "compiled",
    }
    assert "matrix products (needs torch)" in plan.not_measured
    with pytest.raises(InputError, match="nearest: 'barrier'"):
        build_plan(Facts(8, ALL), only=["bariers"])
    with pytest.raises(InputError, match="nothing can be measured here: copy needs 2 GPUs"):
        build_plan(Facts(1, ALL), only=["copy"])
    with pytest.raises(InputError, match="needs cupy"):
        build_plan(Facts(8, frozenset()))


@pytest.mark.parametrize("gpus", [1, 2])
def test_fewer_gpus_still_give_a_profile_that_loads(tmp_path: Path, gpus: int) -> None:
    profile, _, _ = run(tmp_path / "p.yaml", gpus, quick=True)
    name = "ep.dispatch.sm_rate" if gpus > 1 else "ep.dispatch.sm_rate.deepep"
    assert profile.curve(name).kind == ("measured" if gpus > 1 else "derived")
    assert "expert-parallel dispatch and combine (needs 2 GPUs" in profile.evidence or gpus > 1
    assert {law.group for law in profile.laws} >= {"gemm_sm_aware", "attention", "communication"}


# --- interruption ---


def test_an_interrupted_run_keeps_its_rows_and_resumes_after_a_cut_line(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    journal = interrupted(path, 30)
    assert not path.exists()
    assert len(journal.read_text().splitlines()) == 31  # a header and what was done
    journal.write_bytes(journal.read_bytes()[:-20])  # a crash cut the last line off
    _, (context,), seen = run(path, quick=True)
    assert len(context.done) == QUICK_TASKS - 29
    assert seen[0].message == "resuming: 29 tasks were measured before"
    assert all(json.loads(line) for line in journal.read_text().splitlines())
    done = [progress.done_s for progress in seen]
    assert done == sorted(done) and seen[-1].done_s == seen[-1].total_s
    assert any("all_to_all operation=combine" in progress.text for progress in seen)
    first = path.read_bytes()
    _, (context,), _ = run(path, quick=True)  # a finished run is set aside and measured anew
    assert len(context.done) == QUICK_TASKS and path.read_bytes() == first
    assert (tmp_path / "p.rows.jsonl.previous").exists()


def test_a_run_that_an_earlier_release_began_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    journal = interrupted(path, QUICK_TASKS - 1)
    text = journal.read_text()
    assert '"left_free"' in text
    former = text.replace('"left_free"', '"told"').replace('"aware_alone_ratio"', '"told_alone_ratio"')
    journal.write_text(former)
    _, (context,), _ = run(path, quick=True)
    assert len(context.done) == 1


def test_a_run_out_of_time_says_so_and_is_completed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "p.yaml"
    clock = itertools.count()
    monkeypatch.setattr("moesim.kernels.calibrate.run.time", SimpleNamespace(monotonic=lambda: next(clock)))
    profile, (first,), seen = run(path, quick=True, budget_s=30)  # a second passes with every question
    rest = QUICK_TASKS - len(first.done)
    assert len(first.done) == 30
    assert f"{rest} tasks, out of time" in profile.evidence and "out of time" in seen[-1].message
    monkeypatch.undo()
    profile, (second,), _ = run(path, quick=True)
    assert len(second.done) == rest and "out of time" not in profile.evidence


def test_another_machine_or_garbage_cannot_be_resumed(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    journal = interrupted(path, 5)
    with pytest.raises(InputError, match="cannot be resumed"):
        run(path, gpus=4)
    for text in ('"hello"\n', "{}\n", '{"header": 3}\n', "\x00\n", '{"header": {}}\n{"seconds": 3}\n'):
        journal.write_text(text)
        with pytest.raises(InputError, match=r"remove the file|cannot be resumed"):
            run(path)


# --- what goes wrong ---


def test_failed_tasks_are_reported_and_the_others_kept(tmp_path: Path) -> None:
    profile, _, _ = run(tmp_path / "p.yaml", quick=True, set_up=lambda c: c.broken.add("interference"))
    assert "tasks of interference (made to fail)" in profile.evidence
    with pytest.raises(InputError, match="no task gave a usable time"):  # and not an empty profile
        run(tmp_path / "q.yaml", quick=True, set_up=lambda c: c.broken.update(TRUTH))
    assert not (tmp_path / "q.yaml").exists()
    assert {law.id.split(".")[0] for law in profile.laws} == {"hopper-interference"}
    assert profile.curve("ep.dispatch.sm_rate.deepep").kind == "derived"  # carried


@pytest.mark.parametrize(
    ("options", "gpu", "message"),
    [
        ({}, {"utilisation": 0.9}, "--allow-busy"),
        ({}, {"mig": True}, "MIG"),
        ({"accelerator": "h800-sxm"}, {}, "by transfer"),
        ({"accelerator": "h999"}, {}, "unknown accelerator"),
        ({}, {"name": "NVIDIA X1"}, "--accelerator my-gpu.yaml"),
        ({"gpus": (9,)}, {}, "GPUs 0 to 7"),
        ({"only": ("everything",)}, {}, "unknown measurement"),
        ({"output": Path("p.txt")}, {}, "choose such a name"),
        ({"output": Path("missing/p.yaml")}, {}, "does not exist"),
    ],
)
def test_unusable_machines_and_options_are_input_errors(
    tmp_path: Path, options: Any, gpu: Any, message: str
) -> None:
    chosen = Options(**{"output": tmp_path / "p.yaml"} | options)
    with pytest.raises(InputError, match=message):
        calibrate(chosen, machine=machine(**gpu), context=Synthetic)
    assert list(tmp_path.iterdir()) == []


def test_a_busy_machine_measured_on_purpose_is_marked_and_only_some_are_measured(tmp_path: Path) -> None:
    options = Options(
        output=tmp_path / "p.yaml", quick=True, allow_busy=True, only=("hbm", "barrier", "copy")
    )
    profile = load_profile(calibrate(options, machine=machine(utilisation=0.5), context=Synthetic))
    note = profile.curve("copy.push.sm_rate").conditions.note or ""
    assert "busy: 50% utilised" in note and "quick run" in note
    assert profile.curve("barrier.latency").curve.at(8).value == pytest.approx(6.4e-6, rel=0.02)
    assert profile.curve("ep.dispatch.sm_rate.deepep").kind == "derived"  # carried


def test_rows_refuse_what_is_no_time() -> None:
    task = TimingTask("copy", {"size_bytes": 1})
    for times in ((), (float("nan"),), (0.0,), (-1.0,)):
        assert not row_of(task, Sample(times)).ok
    assert not row_of(task, Sample((1.0,), {"bytes": float("inf")})).ok
    row = row_of(task, Sample((3.0, 1.0, 2.0, 2.0, 100.0)))
    assert row.seconds == 2.0 and row.low_s >= 1.0 and row.high_s <= 100.0 and row.repeats == 5
    assert TimedRow.from_json(json.loads(row.to_json()), "here") == row


# --- drift ---


def test_drift_names_the_entry_and_the_point(full: CalibrationProfile) -> None:
    slower = full.curve("copy.push.sm_rate")
    points = tuple((p[0], p[1] * (0.5 if p[0] == 8 else 0.8)) for p in slower.points)
    changed = type(slower).model_validate({**slower.model_dump(), "points": points})
    curves = [changed if c.id == slower.id else c for c in full.curves if c.id != "barrier.latency"]
    new = full.model_copy(update={"curves": tuple(curves)})
    assert all(row.median == 0.0 and not row.drifted for row in compare(full, full))
    first, *_, last = compare(full, new)
    assert first.id == "copy.push.sm_rate" and first.drifted
    assert first.median == pytest.approx(-0.2, abs=1e-6) and first.worst == pytest.approx(-0.5)
    assert first.worst_at == "8"
    assert last.id == "barrier.latency" and last.note == "only in the old profile"


# --- transfer ---


def test_transfer_to_h800_carries_scales_and_drops(full: CalibrationProfile) -> None:
    h200, h800 = load_accelerator("h200-sxm"), load_accelerator("h800-sxm")
    assert all(row.worst == 0.0 for row in compare(full, transfer(full, h200, h200)))  # to itself
    said = {s.id: s for s in statements(full, h200, h800)}
    moved = transfer(full, h200, h800)
    assert moved.name == "h800-from-h200" and moved.accelerator == "h800-sxm"
    # Same SMs: what one SM moves and what a product takes.
    assert moved.curve("ep.dispatch.sm_rate").points == full.curve("ep.dispatch.sm_rate").points
    assert said["ep.dispatch.sm_rate"].verdict == "carries over"
    # A share of a nominal link stays a share; a rate that the link bounds follows 200/450.
    share = "ep.dispatch.scale_up_fraction"
    assert moved.curve(share).points == full.curve(share).points
    push, before = moved.curve("copy.push.sm_rate").curve, full.curve("copy.push.sm_rate").curve
    assert said["copy.push.sm_rate"].verdict == "scales"
    assert push.at(64).value == pytest.approx(before.at(64).value * 200 / 450, rel=0.02)
    assert push.at(1).value == before.at(1).value  # one SM is its own limit
    # Memory follows 3.35/4.8.
    copies = next(c for c in moved.curves if "copy" in c.used_for)
    original = next(c for c in full.curves if "copy" in c.used_for)
    assert copies.points[-1][1] == pytest.approx(original.points[-1][1] * 3.35 / 4.8, rel=1e-4)
    # Published NIC shares stand as they stood.
    assert moved.curve("p2p.nic_fraction") == full.curve("p2p.nic_fraction")
    for entry in moved.entries():
        before_entry = full.entry(entry.id)
        if before_entry.kind == "measured" and "H200" in (before_entry.conditions.device or ""):
            assert entry.kind == "derived" and entry.residual.relative > before_entry.residual.relative
            assert "from h200-sxm" in (entry.note or "")


def test_a_nic_measured_on_the_source_cannot_be_transferred(full: CalibrationProfile) -> None:
    own = full.curve("ep.dispatch.sm_rate").model_copy(update={"id": "ep.nic_fraction.mine", "y_unit": "1"})
    profile = full.model_copy(update={"curves": (*full.curves, own)})
    h200, h800 = load_accelerator("h200-sxm"), load_accelerator("h800-sxm")
    moved = transfer(profile, h200, h800)
    with pytest.raises(InputError, match="no curve"):
        moved.curve("ep.nic_fraction.mine")
    assert "ep.nic_fraction.mine" in moved.evidence


def test_only_products_that_memory_bounds_slow_down_with_it(full: CalibrationProfile) -> None:
    h200, h800 = load_accelerator("h200-sxm"), load_accelerator("h800-sxm")
    before, after = (
        {row[:4]: row[4] for t in profile.gemm_tables if t.dtype == "bf16" for row in t.points}
        for profile in (full, transfer(full, h200, h800))
    )
    assert after[4096, 4096, 7168, 1] == before[4096, 4096, 7168, 1]
    slow = [shape for shape in before if after[shape] < before[shape]]
    assert slow and all(shape[0] <= 128 for shape in slow)
    for shape in slow:
        assert after[shape] == pytest.approx(before[shape] * 3.35 / 4.8, rel=1e-3)


def test_other_dies_are_refused(full: CalibrationProfile) -> None:
    h200 = load_accelerator("h200-sxm")
    for other, reason in (("h20", "78 SMs"), ("a100-sxm", "Ampere")):
        with pytest.raises(InputError, match=reason):
            transfer(full, h200, load_accelerator(other))
    with pytest.raises(InputError, match="transfer from h200-sxm"):
        transfer(full, load_accelerator("h800-sxm"), h200)
