"""The section of docs/planner.md with three searches of the home case, which take a minute or two."""

from __future__ import annotations

import json
from dataclasses import dataclass

import moesim
from moesim.simulator.planner.result import PlanResult, PlanRow
from moesim.simulator.planner.result import difference
from moesim.simulator.scenario import load_scenario

HOME = "deepseek-v3-2048xh800"
BEGIN, END = "<!-- searches -->\n", "<!-- end of searches -->"
CHECK = "<!-- simulated: "
GIB = 2.0**30

SEARCHES: dict[str, tuple[list[str], moesim.PlanSpace]] = {
    "20 communication SMs": ([], moesim.PlanSpace(sms=(20,))),
    "the whole default space": ([], moesim.PlanSpace()),
    "experts of Zipf popularity, exponent 0.5 (a what-if)": (
        ["routing.load={kind: zipf, exponent: 0.5}"], moesim.PlanSpace()
    ),
}  # fmt: skip
"""Titles, overrides of the home case, and spaces."""


@dataclass(frozen=True)
class Searched:
    """One search: its title, the overrides of the home case, and what was found."""

    title: str
    overrides: list[str]
    found: PlanResult


def search_all() -> list[Searched]:
    """Run every search."""
    return [
        Searched(title, overrides, moesim.plan(load_scenario(HOME, overrides), space, top=10, workers=2))
        for title, (overrides, space) in SEARCHES.items()
    ]


def section_on(page: str) -> str:
    """The section as it stands on a page, marks included."""
    return BEGIN + page.split(BEGIN)[1].split(END)[0] + END


def section(searched: list[Searched]) -> str:
    """Markdown of the searches, and in a comment the plans that a test simulates again."""
    lines = [
        f"Written by `make scoreboard` (moesim {moesim.__version__}). Own plan: DeepSeek's.",
        "",
        "| search | plans | legal | fit | closed form | engine | all others need | best plan | own plan |",
        "|---|---|---|---|---|---|---|---|---|",
        *(_row(one) for one in searched),
        "",
        "Seconds that DeepSeek's own plan takes more than the best with 20 communication SMs, by mechanism",
        "(eq. P4):",
        "",
        "| mechanism | s |",
        "|---|---|",
    ]
    first = searched[0].found
    assert first.own is not None
    gaps = difference(first.own.causes_s, first.best.causes_s)
    lines += [f"| {cause} | {value:+.2f} |" for cause, value in gaps.items()]
    lines += [
        "",
        "The five best families of that search:",
        "",
        "| plan | precision | recompute | step (s) | GiB |",
    ]
    lines += ["|---|---|---|---|---|"]
    lines += [
        f"| {row.label} | {row.precision} | {row.recompute} | {row.time_s:.2f} "
        f"| {row.memory_bytes / GIB:.1f} |"
        for row in first.ranked[:5]
    ]
    again = [[*one.overrides, *_overrides(one.found.best)] for one in searched]
    times = [round(one.found.best.time_s, 2) for one in searched]
    lines += ["", f"{CHECK}{json.dumps(list(zip(times, again, strict=True)))} -->"]
    return BEGIN + "\n".join(lines) + "\n" + END


def simulated_on(page: str) -> list[tuple[float, list[str]]]:
    """Step and overrides of every best plan that the section shows."""
    text = section_on(page).split(CHECK)[1].split(" -->")[0]
    return [(float(time_s), [str(o) for o in overrides]) for time_s, overrides in json.loads(text)]


def _row(one: Searched) -> str:
    found = one.found
    rest = "" if found.proven_s is None else f"{found.proven_s:.2f} s"
    own = "does not fit or is illegal"
    if found.own is not None:
        behind = found.own.time_s / found.best.time_s - 1.0
        place = f"{behind:.1%} behind" if behind >= 0.0 else f"{-behind:.1%} ahead"
        risk = "" if found.own.verdict == "fits" else f", {found.own.verdict}"
        own = f"{found.own.time_s:.2f} s, {place}, {found.own.memory_bytes / GIB:.1f} GiB{risk}"
    best = f"{found.best.time_s:.2f} s: {_said(found.best)}"
    return (
        f"| {one.title} | {found.considered:,} | {found.legal:,} | {found.fitting:,} | {found.estimated:,} | "
        f"{found.simulated} | {rest} | {best} | {own} |"
    )


def _said(row: PlanRow) -> str:
    return f"{row.label}, {row.sms} SMs, {row.memory_bytes / GIB:.1f} GiB"


def _overrides(row: PlanRow) -> list[str]:
    """A plan as overrides of its scenario."""
    eplb = row.scenario.routing.eplb
    plan = row.scenario.parallel.model_dump_json()
    keys = {
        "parallel": plan,
        "schedule": row.schedule,
        "precision": row.precision,
        "recompute": row.recompute,
        "communication.sms": row.sms,
        "stages.layers": json.dumps(list(row.layers)),
    }
    placed = [] if eplb is None else [f"routing.eplb={eplb.model_dump_json(exclude_none=True)}"]
    return [*(f"{key}={value}" for key, value in keys.items()), *placed]
