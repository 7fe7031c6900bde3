"""The pages of the dashboard, their groups, and the scenario that it starts with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

HOME = "deepseek-v3-2048xh800"
"""The scenario that is shown until a visitor chooses another, called the home case."""

SERVED_HOME = "serve-qwen3-30b-a3b-h100"
"""The scenario whose changes describe one that says how a model is served, and not how it is trained."""

# Module below `app/views`, title, icon; the first is the start page.
PAGES = [
    ("start", "Start", ":material/home:"),
    ("scenario", "Scenario", ":material/tune:"),
    ("result", "Result", ":material/speed:"),
    ("timeline", "Timeline", ":material/view_timeline:"),
    ("topology", "Topology", ":material/hub:"),
    ("compare", "Compare", ":material/compare_arrows:"),
    ("what_if", "What-if", ":material/science:"),
    ("planner", "Planner", ":material/route:"),
    ("sweep", "Sweep", ":material/grid_on:"),
    ("fleet", "Fleet", ":material/workspaces:"),
    ("run_cost", "Run & cost", ":material/payments:"),
    ("calibration", "Calibration", ":material/straighten:"),
    ("trace", "Trace", ":material/query_stats:"),
    ("evidence", "Evidence", ":material/fact_check:"),
    ("hardware", "Hardware", ":material/memory:"),
    ("training_sizing", "Training sizing", ":material/expand:"),
    ("curves", "Curves", ":material/ssid_chart:"),
    ("serving", "Serving", ":material/chat:"),
    ("serving_sizing", "Serving sizing", ":material/dns:"),
]

GROUPS: Mapping[str, Sequence[str]] = {
    "": ("start",),
    "One step": ("scenario", "result", "timeline", "topology"),
    "Decide": ("planner", "hardware", "compare", "what_if", "curves", "sweep", "fleet"),
    "The run": ("training_sizing", "run_cost"),
    "Serve": ("serving", "serving_sizing"),
    "Trust": ("evidence", "trace", "calibration"),
}
"""Headings of the navigation, with the pages below each."""

ALONE = ("start",)
"""Pages without a title of their own and without the pinned scenarios."""


def grouped(names: Sequence[str]) -> dict[str, list[str]]:
    """The pages that exist below the heading of each; a page without a heading comes last."""
    found = {title: [name for name in group if name in names] for title, group in GROUPS.items()}
    rest = [name for name in names if not any(name in group for group in GROUPS.values())]
    return {title: group for title, group in {**found, "More": rest}.items() if group}
