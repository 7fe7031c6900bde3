"""Runs a step without each of its causes for `explain`, and prints what every cause costs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moesim.cli.console import percent, print_table, print_text, working

if TYPE_CHECKING:
    from moesim.simulator.predict.prepared import Prepared
    from moesim.simulator.predict.result import Result
    from moesim.simulator.studies.counterfactuals import Counterfactuals


def run_counterfactuals(prepared: Prepared, result: Result) -> Counterfactuals:
    """Run the step without each of its causes; a run that takes long is named on stderr."""
    with working("running the step without its causes") as say:
        from moesim.simulator.studies.counterfactuals import counterfactuals

        return counterfactuals(
            prepared,
            result.step.time_s,
            lambda number, most, cause: say(f"{number + 1} of {most}: the step without {cause}"),
        )


def print_counterfactuals(runs: Counterfactuals) -> None:
    """Print the causes, the most expensive first, then all of them together."""
    print_text("\nwhat each cause costs: the step without it, one engine run each, seconds")
    rows = [
        (row.cause, f"{row.without_s:.3f}", f"{row.cost_s:.3f}", percent(row.share))
        for row in (*runs.causes, runs.together)
    ]
    print_table(("cause", "step without it", "cost", "of step"), rows, right=(1, 2, 3))
    print_text(runs.sentence)
