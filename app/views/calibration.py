"""The page Calibration: curves of a profile, the evidence and error of each entry, drift between two."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from math import inf
from typing import Any

import streamlit as st

from moesim.app import exports, forms, state, upload_files, uploads, widgets
from moesim.app.charts import evidence as charts
from moesim.app.texts import escaped
from moesim.hwmodels.accelerator import Accelerator, load_accelerator
from moesim.hwmodels.calibration import CalibrationProfile, list_profiles, profile_hash
from moesim.hwmodels.calibration_entry import LawGroup
from moesim.hwmodels.drift import (
    CAUTION,
    Drift,
    PointDrift,
    compare,
    compare_points,
    shared_entries,
    verdict,
    verdict_of_points,
)
from moesim.hwmodels.errors import InputError, MoesimError
from moesim.simulator.cost.compute import SmLaws

GROUPS: dict[LawGroup, str] = {
    "gemm_sm_aware": "SM-aware GEMMs",
    "gemm_sm_unaware": "SM-unaware GEMMs",
    "attention": "attention",
    "memory_bound": "memory-bound",
    "communication": "communication",
}
MOST_SMS = 48
"""Largest number of SMs for which the slow-down is drawn; DeepEP uses 20 to 24."""


def show() -> None:
    """Draw the page."""
    scenario = state.current()
    left, middle, right = st.columns(3)
    with right:
        _upload()
    names = [*list_profiles(), *st.session_state.get("profiles", {})]
    current = state.override("profile") or scenario.profile
    start = names.index(current) if current in names else 0
    titles = dict(st.session_state.get("profiles", {}))

    def titled(profile: str) -> str:
        return str(titles.get(profile, profile))

    name = forms.one_of(
        left.selectbox,
        "Profile",
        "calibration.profile",
        names,
        names[start],
        key="profile shown",
        format_func=titled,
    )
    show: dict[str, Any] = {"key": "profile compared", "format_func": titled}
    others = ["nothing", *names]
    other = forms.one_of(middle.selectbox, "Compare with", "calibration.compared", others, others[0], **show)
    if name != current:
        left.button("Use this profile in the scenario", on_click=state.set_override, args=("profile", name))
    profile = uploads.profile_of(name)
    st.markdown(
        f"**{escaped(profile.name)}** for {escaped(profile.accelerator)}: {escaped(profile.description)}"
    )
    st.caption(f"{escaped(profile.software)}. {escaped(profile.evidence)} Hash {profile_hash(profile)[:12]}.")
    if other != "nothing":
        _drift(uploads.profile_of(other), profile)
    accelerator = scenario.machines[0].accelerator  # for a generic profile
    with suppress(InputError):
        accelerator = load_accelerator(profile.accelerator)
    _curves(profile, accelerator)
    _entries(profile)


def _upload() -> None:
    file = st.file_uploader(
        "Upload a profile that `moesim calibrate` wrote (YAML or JSON)",
        key="profile upload",
        max_upload_size=uploads.MAX_BYTES["profile"] // 10**6,
    )
    try:
        given = upload_files.given(file)
        if given is None:
            return
        kept = state.accept("profile", *given)
    except MoesimError as error:
        st.error(escaped(error), icon=":material/error:")
        return
    st.session_state.setdefault("profiles", {})[kept.token] = kept.name
    st.success(f"{escaped(kept.name)} is in the list below.", icon=":material/check:")


def _curves(profile: CalibrationProfile, accelerator: Accelerator) -> None:
    left, right = st.columns(2)
    with left:
        st.header("Bandwidth against SMs")
        rates = charts.sm_curves(profile, "GB/s")
        if rates:
            chart = charts.over_sms(rates, "rate (GB/s per GPU)")
            widgets.figure(chart, "Communication rate against SMs", key="rates")
        else:
            st.info("This profile has no rate measured against the number of SMs.")
    with right:
        st.header("Slow-down against SMs")
        try:
            laws = SmLaws(accelerator, profile)
            counts = range(0, min(MOST_SMS, accelerator.n_sms - 1) + 1, 4)
            have = {law.group for law in profile.laws}
            lines = {
                text: [(n, laws.at(group, n, True).factor) for n in counts]
                for group, text in GROUPS.items()
                if group in have
            }
        except InputError as error:  # an accelerator whose compute units nobody published
            st.info(escaped(error))
            return
        if lines:
            widgets.figure(charts.slow_downs(lines), "Slow-down against communication SMs", key="laws")
            st.caption(
                f"On {escaped(accelerator.name)}. An SM-aware GEMM is launched on the SMs that "
                "communication leaves free, an SM-unaware one as if it had all of them."
            )
        else:
            st.info("This profile does not say how much communication slows down compute.")


def _entries(profile: CalibrationProfile) -> None:
    entries = list(profile.entries())
    st.header("Entries and their stated errors")
    kinds = sorted({entry.kind for entry in entries})
    wanted = st.pills("Kind of evidence", kinds, selection_mode="multi", key="entry kinds") or kinds
    shown = [entry for entry in entries if entry.kind in wanted]
    widgets.figure(charts.residuals(shown), "The largest stated errors of entries", key="residuals")
    if len(shown) > charts.MOST:
        st.caption(f"The {charts.MOST} largest of {len(shown)} stated errors; all are in the table.")
    header = ("entry", "kind", "stated error", "meaning", "source", "date", "conditions")
    rows = [
        (
            entry.id,
            entry.kind,
            f"{entry.residual.relative:.1%}",
            entry.residual.meaning,
            entry.source,
            entry.date,
            "; ".join(f"{k} {v}" for k, v in entry.conditions.model_dump(exclude_defaults=True).items()),
        )
        for entry in shown
    ]
    widgets.table(header, rows)
    text = exports.csv_text(header, rows)
    widgets.download("Entries (CSV)", text, exports.file_name(f"{profile.name}-entries", "csv"))


def _drift(old: CalibrationProfile, new: CalibrationProfile) -> None:
    st.header(f"{escaped(new.name)} against {escaped(old.name)}")
    points, shared = compare_points(old, new), shared_entries(old, new)
    if not points:
        st.info(
            f"The two profiles have the same figures in all {shared} common entries."
            if shared
            else "The two profiles have no entry in common that can be compared."
        )
        return
    icon = ":material/warning:" if any(point.is_beyond for point in points) else ":material/check_circle:"
    st.markdown(f"{icon} {verdict_of_points(points)}")
    same = f" {shared} entries are from the same source in both and are not compared." if shared else ""
    st.caption(f"{CAUTION}{same}")
    widgets.figure(charts.drift_points(points), "The clearest changes, each with its error bar", key="drift")
    if len(points) > charts.MOST:
        st.caption(f"The {charts.MOST} most significant of {len(points):,} shapes and points.")
    _points(points, f"{new.name}-against-{old.name}")
    with st.expander("Entry by entry"):
        _by_entry(compare(old, new))


def _points(points: Sequence[PointDrift], name: str) -> None:
    """Every shape with both errors, its change and its error bar; the most significant first."""
    only = st.checkbox("Only changes beyond both errors", key="drift beyond")
    shown = [point for point in points if point.is_beyond or not only]
    header = ("entry", "shape or point", "change", "± error", "old error", "new error", "change / error", "")
    rows: list[tuple[str | float | None, ...]] = [
        (
            point.entry,
            point.point,
            point.change,
            point.error,
            point.old_error,
            point.new_error,
            point.significance if point.significance < inf else None,
            "beyond, and not by chance"
            if point.is_clear
            else "beyond both errors"
            if point.is_beyond
            else "within",
        )
        for point in shown
    ]
    percent = st.column_config.NumberColumn(format="percent")
    formats = dict.fromkeys(("change", "± error", "old error", "new error"), percent)
    formats["change / error"] = st.column_config.NumberColumn(format="%.1f")
    widgets.table(header, rows, column_config=formats)
    widgets.download("Changes (CSV)", exports.csv_text(header, rows), exports.file_name(name, "csv"))


def _by_entry(rows: Sequence[Drift]) -> None:
    both = [row for row in rows if row.points]
    st.markdown(f"{verdict(rows)}.")
    for row in both:
        if row.drifted:
            st.markdown(f"- `{row.id}`: {row.summary}")
    widgets.figure(charts.drift(rows), "Change of every common entry", key="drift by entry")
    header = ("entry", "points", "median change", "worst", "stated errors", "")
    cells = [
        (
            row.id,
            row.points,
            f"{row.median:+.1%}" if row.points else "",
            f"{row.worst:+.1%} at {row.worst_at}" if row.points else "",
            f"{row.allowed:.1%}" if row.points else "",
            row.summary,
        )
        for row in rows
    ]
    widgets.table(header, cells)
