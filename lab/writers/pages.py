"""Writes what pages show from fresh runs: docs/validation.md and lab/docs/boards, the README's answer,
the tables of keys in docs/scenario.md, the registries in docs/extend.md, the searches in docs/planner.md,
docs/models.md, lab/docs (sparse-attention.md, mlperf-v6.md, own-runs.md), docs/api.md, the medians that
the dashboard shows (simulator/data/scoreboard.yaml) and the examples' outputs.

    python -m lab.writers.pages [--check] [--scoreboard]

`--check` exits with 1 where a page on disk differs: numbers move only with the code or its data. The open
scoreboard (lab/docs/boards/*.csv), lab/docs (mlperf-v6.md, own-runs.md) and the searches of docs/planner.md
take half an hour: they are computed anew with `--scoreboard` only, and kept as they stand otherwise.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import runpy
import sys
from collections.abc import Mapping
from pathlib import Path

from lab.writers import boards, serving_page
from lab.writers.api_page import page as api_page
from lab.writers.extend_page import filled as with_registries
from lab.writers.home_board import COLLECTIVES, HOME_CASE, collectives_page, home_page
from lab.writers.kept_board import FILE as KEPT_BOARD
from lab.writers.kept_board import current as kept_board
from lab.writers.key_tables import filled
from lab.writers.mlperf_page import PAGE as MLPERF
from lab.writers.mlperf_page import page as mlperf_page
from lab.writers.models_page import page as models_page
from lab.writers.own_runs_page import PAGE as OWN_RUNS
from lab.writers.own_runs_page import page as own_runs_page
from lab.writers.gap_board import TABLE as GAP
from lab.writers.gap_board import table as gap_table
from lab.writers.parts_board import TABLE as PARTS
from lab.writers.parts_board import table as parts_table
from lab.writers.planner_page import search_all, section
from lab.writers.planner_page import section_on as searches_on
from lab.writers.reliability_board import FILE as RELIABILITY
from lab.writers.reliability_board import page as reliability_page
from lab.writers.scoreboard_page import board_pages
from lab.writers.sparse_page import page as sparse_page
from lab.writers.validation_page import page as validation_page
from lab.writers.walkthroughs import current_pages as walkthroughs

from moesim.cli import main as command_line
from moesim.simulator.scenario import load_scenario
from moesim.simulator.scoring.published import context_plans, placement_sensitivity, score
from moesim.simulator.scoring.published_full_resolution import check_full
from moesim.simulator.scoring.scoreboard.rows import KeptBoard
from moesim.simulator.scoring.scoreboard.rows import kept_board as kept_scores
from moesim.simulator.trace.parts import score_all_parts

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "validation.md"
README = ROOT / "README.md"
SCENARIO = ROOT / "docs" / "scenario.md"
EXTEND = ROOT / "docs" / "extend.md"
API = ROOT / "docs" / "api.md"
MODELS = ROOT / "docs" / "models.md"
SPARSE = ROOT / "lab" / "docs" / "sparse-attention.md"
PLANNER = ROOT / "docs" / "planner.md"
BEGIN, END = "<!-- answer -->\n", "<!-- end of answer -->"
ANSWER_ENDS = "where the step goes"
STEP = "time per step, s"
HOME = "deepseek-v3-2048xh800"


def readme_with_answer() -> str:
    """The README with what `moesim simulate` prints now, and the step beside the published one."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        simulate(HOME)
    shown = output.getvalue()
    answer = shown.split(ANSWER_ENDS)[0].strip()
    row = next(line for line in shown.splitlines() if line.strip().startswith(STEP))
    published, predicted, error = row.split(STEP)[1].split()
    evidence = (
        f"DeepSeek published {published} s for this step; the prediction is {predicted} s ({error}). "
        + scoreboard_sentence(kept_scores())
    )
    before, rest = README.read_text("utf-8").split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}```\n{answer}\n```\n{evidence}\n{END}{after}"


def scoreboard_sentence(board: KeptBoard) -> str:
    """How far the predictions of published MoE and dense steps are off, beside the home case."""
    moe, dense = board.named("MoE"), board.named("dense")
    return (
        f"Of the open scoreboard's training steps ({board.computed}), {moe.rows} of MoE models are predicted "
        f"with a median error of {moe.median_absolute_error:.1%} ({moe.median_error:+.1%} signed; the worst "
        f"{moe.worst_absolute_error:.0%}), and {dense.rows} of dense models with "
        f"{dense.median_absolute_error:.1%} ([scoreboard](docs/validation.md))."
    )


def printed(path: Path) -> str:
    """What an example prints; it runs in this process, so that examples share what was read once."""
    shown = io.StringIO()
    with contextlib.chdir(ROOT), contextlib.redirect_stdout(shown):
        if path.suffix == ".py":
            runpy.run_path(str(path), run_name="__main__")
        else:
            simulate(f"examples/{path.name}")
    return shown.getvalue()


def simulate(name: str) -> None:
    """Run `moesim simulate` in this process; a failed command ends this one with its exit code."""
    os.environ["COLUMNS"] = "80"  # whatever the terminal of the one who writes the pages
    try:
        command_line(["simulate", name])
    except SystemExit as end:
        if end.code:
            raise


def example_outputs() -> dict[Path, str]:
    """The output of every example, by the file that keeps it."""
    folder = ROOT / "examples"
    paths = [*sorted(folder.glob("*.py")), *sorted(folder.glob("*.yaml"))]
    return {path.with_suffix(".out"): printed(path) for path in paths}


def current_pages(scoreboard: bool = False) -> dict[Path, str]:
    """Every generated page as the code would write it now; the open scoreboard is kept unless asked for."""
    files = boards.computed() if scoreboard else boards.kept()
    served = serving_page.computed() if scoreboard else serving_page.kept()
    board = boards.board(files)
    rows, placements = score(), placement_sensitivity(load_scenario(HOME))
    planner = PLANNER.read_text("utf-8")
    searches = section(search_all()) if scoreboard else searches_on(planner)
    return {
        PAGE: validation_page(rows, placements, files),
        HOME_CASE: home_page(rows, placements, context_plans(), check_full()),
        COLLECTIVES: collectives_page(),
        RELIABILITY: reliability_page(),
        GAP: gap_table(),
        PARTS: parts_table(list(score_all_parts())),
        **files,
        **board_pages(files, board),
        **served,
        serving_page.PAGE: serving_page.page(served),
        serving_page.GROUPS: serving_page.groups_page(served),
        KEPT_BOARD: kept_board(board),
        README: readme_with_answer(),
        PLANNER: planner.replace(searches_on(planner), searches),
        SCENARIO: filled(SCENARIO.read_text("utf-8")),
        EXTEND: with_registries(EXTEND.read_text("utf-8")),
        API: api_page(),
        MODELS: models_page(),
        SPARSE: sparse_page(),
        **({MLPERF: mlperf_page(), OWN_RUNS: own_runs_page()} if scoreboard else {}),
        **example_outputs(),
    }


def stale(pages: Mapping[Path, str]) -> list[str]:
    """Names of the pages that differ on disk."""
    return [
        str(path.relative_to(ROOT))
        for path, text in pages.items()
        if not path.is_file() or path.read_text("utf-8") != text
    ]


def main() -> None:
    """Write or check the pages."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--scoreboard", action="store_true")
    options = parser.parse_args()
    pages = {**current_pages(options.scoreboard), **walkthroughs()}
    names = stale(pages)
    if options.check:
        sys.exit(f"not what the code predicts: {', '.join(names)}; run make pages" if names else 0)
    for name in names:
        (ROOT / name).write_text(pages[ROOT / name], "utf-8")
    print(f"rewritten: {', '.join(names) or 'nothing'}")


if __name__ == "__main__":
    main()
