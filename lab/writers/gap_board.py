"""lab/docs/boards/expert-gap.csv: what the planner claims over plans that teams tuned, and its table.

    python -m lab.writers.gap_board [--workers N] [ID ...]

Every row is a few searches, about a minute of one core; the rows of the named plans are replaced, by default
all. `docs/validation.md` shows the stored rows.
"""

from __future__ import annotations

import argparse
import csv
import io
from pathlib import Path

from moesim.simulator.scoring.expert_gap import ExpertGap, expert_gaps, summary, tuned_plans

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "lab" / "docs" / "boards" / "expert-gap.csv"
COLUMNS = ("id", "title", "trainer", "tuned", "tuned_s", "winner", "winner_s", "gain", "p10", "p90", "shares")


def line_of(gap: ExpertGap) -> dict[str, str]:
    """One line of the file; a plan without a claim has its reason in place of the shares."""
    if gap.tuned_s is None or gap.winner_s is None or gap.gain is None:
        known = {} if gap.tuned_s is None else {"tuned": gap.tuned, "tuned_s": f"{gap.tuned_s:.4f}"}
        return {"id": gap.id, "title": gap.title, "trainer": gap.trainer, **known, "shares": gap.refused}
    band = gap.behind
    return {
        "id": gap.id, "title": gap.title, "trainer": gap.trainer, "tuned": gap.tuned,
        "tuned_s": f"{gap.tuned_s:.4f}", "winner": gap.winner, "winner_s": f"{gap.winner_s:.4f}",
        "gain": f"{gap.gain:.4f}", "p10": "" if band is None else f"{band.p10:.4f}",
        "p90": "" if band is None else f"{band.p90:.4f}", "shares": "; ".join(map(str, gap.shares)),
    }  # fmt: skip


def lines() -> dict[str, dict[str, str]]:
    """The stored lines by id, in the order of the list of tuned plans."""
    if not FILE.is_file():
        return {}
    stored = {line["id"]: line for line in csv.DictReader(io.StringIO(FILE.read_text("utf-8")))}
    return {plan.id: stored[plan.id] for plan in tuned_plans() if plan.id in stored}


def text_of(rows: dict[str, dict[str, str]]) -> str:
    """The file's text."""
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows[plan.id] for plan in tuned_plans() if plan.id in rows)
    return out.getvalue()


def section() -> list[str]:
    """The section of docs/validation.md."""
    teams = {plan.id: plan for plan in tuned_plans()}
    rows = [row for row in lines().values() if row["gain"]]
    left = [row for row in lines().values() if not row["gain"]]
    gains = [ExpertGap(id="", title="", trainer="", team="", remark="", gain=float(r["gain"])) for r in rows]
    total = summary(gains)
    cells = [
        f"| {row['id']} | {row['title']} | {teams[row['id']].team} | {row['tuned']} | {row['winner']} | "
        f"{float(row['gain']):+.1%} | {row['shares']} |"
        for row in rows
    ]
    return [
        "## What does the planner claim over tuned plans?",
        "",
        "A team that tunes its own trainer should be hard to beat. Each row is a plan that such a team published, "
        "and the best",
        "plan that a search around it finds (every degree halved and doubled, until nothing is faster), with the "
        "same model,",
        "machine, batch, precision, trainer and software. The last column changes one key after the other. "
        "`moesim validate",
        "--expert-gap` prints it anew, `python -m lab.writers.gap_board` stores it.",
        "",
        f"{total['plans']} plans: the claim is {total['median']:.1%} at the median and {total['worst']:.1%} at most. "
        f"{len(left)} more have no claim."
        if rows
        else "No plan was searched yet.",
        "",
        "| plan | job | tuned by | tuned | winner | claim | by which keys |",
        "|---|---|---|---|---|---|---|",
        *cells,
        *(
            f"| {r['id']} | {r['title']} | {teams[r['id']].team} | {r['tuned']} |  |  | {r['shares']} |"
            for r in left
        ),
        "",
        *(f"- `{plan.id}`: {plan.remark}." for plan in teams.values() if plan.remark),
        *([""] if any(plan.remark for plan in teams.values()) else []),
    ]


def main() -> None:
    """Compute the rows and write the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ids", nargs="*")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    rows = lines()
    for gap in expert_gaps(options.ids, options.workers):  # each is kept as soon as it is known
        rows[gap.id] = line_of(gap)
        FILE.write_text(text_of(rows), "utf-8")
    print(f"{len(rows)} plans in {FILE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
