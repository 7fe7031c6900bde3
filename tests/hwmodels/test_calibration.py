from __future__ import annotations

from pathlib import Path

import pytest

from moesim.hwmodels.calibration import (
    CalibrationProfile,
    list_profiles,
    load_profile,
    profile_hash,
)
from moesim.hwmodels.errors import InputError

HEAD = """
name: {name}
accelerator: h800-sxm
software: test kernels
description: test
evidence: made up for a test
"""
LAW = """
laws:
  - id: {id}
    group: attention
    points: [[0, 1.0], [20, {value}]]
    source: made up for a test
    kind: assumed
    date: "2026-11-20"
    residual: {{relative: 0.1, meaning: made up}}
"""


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(HEAD.format(name=name) + text)
    return path


@pytest.mark.parametrize("name", list_profiles())
def test_every_shipped_profile_loads_and_every_entry_has_its_evidence(name: str) -> None:
    profile = load_profile(name)
    assert profile.name == name
    assert len(profile.evidence) > 80
    for entry in profile.entries():
        assert 0 < entry.residual.relative < 1, entry.id
        assert len(entry.source) > 20 and entry.kind and entry.date != "undated", entry.id
    for law in profile.laws:  # more communication SMs never slow compute less, nor communication more
        values = [value for _, value in law.points]
        assert values == sorted(values, reverse=law.group == "communication"), law.id
    for curve in profile.curves:
        if curve.used_for and curve.y_unit == "GB/s":  # moving more bytes never takes less time
            times = [x / y for x, y in curve.curve.points]
            assert times == pytest.approx(sorted(times), rel=1e-4), curve.id


def test_the_trace_profile_holds_no_communication_kernel_and_no_total() -> None:
    profile = load_profile("h800-trace")
    labels = [str(p[-1]) for t in profile.gemm_tables for p in t.points if isinstance(p[-1], str)]
    labels += [
        str(p[2]) for c in profile.curves for p in c.points if len(p) == 3 and c.id.startswith("h800-trace")
    ]
    assert len(labels) > 60
    assert not [x for x in labels if "notify" in x or "ep_" in x or "129" in x]


def test_profiles_include_each_fact_once() -> None:
    trace, published = load_profile("h800-trace"), load_profile("h800-published")
    shared = "hopper-interference.memory_bound"
    assert trace.entry(shared) == published.entry(shared)
    assert trace.launch_gap == published.launch_gap is not None
    ids = [entry.id for entry in trace.entries()]
    assert len(ids) == len(set(ids))


def test_includes_come_after_own_entries_and_are_counted(tmp_path: Path) -> None:
    write(tmp_path, "inner", LAW.format(id="inner.law", value=1.5))
    outer = write(tmp_path, "own", "include: [inner]\n" + LAW.format(id="outer.law", value=1.2))
    assert [law.id for law in load_profile(outer).laws] == ["outer.law", "inner.law"]
    outer = write(tmp_path, "outer", f"include: [{'generic-priors, ' * 2000}]\n")
    with pytest.raises(InputError, match=r"outer\.yaml: include names 2,000 profiles, .* more than 40"):
        load_profile(outer)
    for n in range(8):  # 3 of each below: 3 ^ 8 files
        write(tmp_path, f"level{n}", f"include: [{', '.join([f'level{n + 1}'] * 3)}]\n")
    write(tmp_path, "level8", "")
    with pytest.raises(InputError, match="more than 40"):
        load_profile(tmp_path / "level0.yaml")


def test_an_include_cycle_is_named(tmp_path: Path) -> None:
    write(tmp_path, "one", "include: [two]\n")
    write(tmp_path, "two", "include: [one]\n")
    with pytest.raises(InputError, match="one -> two -> one"):
        load_profile(tmp_path / "one.yaml")


def test_the_same_id_with_other_content_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "inner", LAW.format(id="same.law", value=1.5))
    outer = write(tmp_path, "outer", "include: [inner]\n" + LAW.format(id="same.law", value=1.2))
    with pytest.raises(InputError, match=r"same\.law"):
        load_profile(outer)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (LAW.format(id="x.law", value=1.2).replace("residual:", "residuum:"), "residual"),
        (LAW.format(id="x.law", value=1.2).replace("made up for a test", "xx", 1), "source"),
        (LAW.format(id="x.law", value=1.2).replace("points: [[0, 1.0], [20, 1.2]]", "form: table"), "points"),
        ("launch_gap: {value: 2, kind: assumed, source: made up, date: '2026'}\n", "bare number"),
        ("gemm_tables: [{}]\n", "missing"),
        ("colour: red\n", "colour"),
    ],
)
def test_a_malformed_profile_names_file_and_key(tmp_path: Path, text: str, match: str) -> None:
    path = write(tmp_path, "bad", text)
    with pytest.raises(InputError, match=match) as error:
        load_profile(path)
    assert "bad.yaml" in str(error.value) and "\n" not in str(error.value)


def test_the_hash_follows_the_content(tmp_path: Path) -> None:
    first = load_profile(write(tmp_path, "p", LAW.format(id="a.law", value=1.2)))
    again = CalibrationProfile.model_validate(first.model_dump())
    other = load_profile(write(tmp_path, "q", LAW.format(id="a.law", value=1.3)))
    assert profile_hash(first) == profile_hash(again) != profile_hash(other)
    assert len(profile_hash(first)) == 64


@pytest.mark.parametrize(
    ("name", "hashed"),
    [
        # Both since 2026-11-26, when operators were measured anew (decisions 0075, 0080).
        ("h800-trace", "6cf5853842f5ba2e3083fb06a1479e39c88d80b4dd1b297924c8edc0e6e21b3e"),
        ("h200-8gpu", "deade7080c12da1fa4123704e7bc463eba2cb66dd5ae08228c165caadfb6b08c"),
        ("hopper-interference", "48ccc57a6efdb94e0798ae75219d8de1a0f258d1bd4d5e2f7e5958d839ad7d22"),
    ],
)
def test_the_hash_of_a_shipped_profile_is_that_of_earlier_releases(name: str, hashed: str) -> None:
    """Stores and kept predictions are keyed on it, and a name that changed is no other content."""
    assert profile_hash(load_profile(name)) == hashed


FORMER = """\
in_situ_groups: [gemm_told, memory_bound]
gemm_tables:
  - id: a.gemm
    cls: gemm
    dtype: fp8
    told: true
    unit: TFLOP/s
    points: [[4096, 4096, 4096, 1, 900]]
    source: measured by hand
    kind: measured
    date: "2026-01-01"
    residual: {relative: 0.05, meaning: spread}
laws:
  - id: a.gemm_untold
    group: gemm_untold
    points: [[0, 1.0], [20, 1.4]]
    source: measured by hand
    kind: measured
    date: "2026-01-01"
    residual: {relative: 0.05, meaning: spread}
"""


def test_a_profile_in_the_words_of_earlier_releases_is_read_as_before(tmp_path: Path) -> None:
    former = load_profile(write(tmp_path, "p", FORMER))
    now = FORMER.replace("told: true", "sm_aware: true").replace(
        "group: gemm_untold", "group: gemm_sm_unaware"
    )
    current = load_profile(write(tmp_path, "p", now.replace("[gemm_told,", "[gemm_sm_aware,")))
    assert former == current and profile_hash(former) == profile_hash(current)
    assert former.gemm_tables[0].sm_aware and former.laws[0].group == "gemm_sm_unaware"
    assert former.in_situ_groups == ("gemm_sm_aware", "memory_bound")
    assert former.laws[0].id == "a.gemm_untold"


def test_both_words_at_once_and_unknown_groups_are_refused_with_the_current_ones(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="told: unknown key"):
        load_profile(write(tmp_path, "p", FORMER.replace("told: true", "told: true\n    sm_aware: true")))
    with pytest.raises(InputError, match=r"group='gemm_tld' is not one of gemm_sm_aware, gemm_sm_unaware"):
        load_profile(write(tmp_path, "q", FORMER.replace("group: gemm_untold", "group: gemm_tld")))
    with pytest.raises(InputError, match=r"sm_aware is missing"):
        load_profile(write(tmp_path, "r", FORMER.replace("    told: true\n", "")))


def test_no_generic_prior_hides_behind_a_wider_one() -> None:
    """The first prior that fits is used: one for a single format must come before the one for all."""
    seen: set[tuple[str, str, str | None]] = set()
    for prior in load_profile("generic-priors").priors:
        for cls in prior.used_for:
            assert (cls, prior.of, prior.dtype) not in seen and (cls, prior.of, None) not in seen, prior.id
            seen.add((cls, prior.of, prior.dtype))


@pytest.mark.parametrize("name", ["gb200", "gb300", "b200"])
def test_cudnn_of_2025_replaces_the_attention_of_later_releases(name: str) -> None:
    def first(profile: str, use: str) -> tuple[str, dict[float, float]]:
        curve = next(c for c in load_profile(profile).curves if use in c.used_for)
        return curve.id, dict(curve.curve.points)

    for half, low, high in (("forward", 0.8, 1.2), ("backward", 0.75, 1.2)):
        (old_id, old), (_, new) = (
            first(profile, f"attention_{half}/128") for profile in (f"{name}-cudnn-2025", f"{name}-layers")
        )
        assert old_id == f"{name}-cudnn-2025.{half}_128"
        assert low < old[8192.0] / new[8192.0] < high
        assert (old[8192.0] < new[8192.0]) == (name != "b200")  # which keeps a planner's rates
