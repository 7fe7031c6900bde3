"""The pages of the dashboard, and the scenario that it starts with."""

HOME = "deepseek-v3-2048xh800"
"""The scenario that is shown until a visitor chooses another, called the home case."""

# Module below `app/views`, title, icon; the first is the start page.
PAGES = [
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
    ("evidence", "Evidence", ":material/fact_check:"),
]
