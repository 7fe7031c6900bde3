"""Compares the compiled engine with SimPy on random steps, and writes the table of docs/proof/engines.md."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from random_steps import differences, random_step, toy_of_conftest

from moesim.simulator.engine.compiled.execute import run_compiled
from moesim.simulator.engine.registry import engine_of


def main() -> int:
    """Run the comparison; the exit status is 1 where any record differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--table", type=Path)
    options = parser.parse_args()
    toy, tasks, sends, groups, different = toy_of_conftest(), 0, 0, 0, []
    for seed in range(options.steps):
        programs = random_step(toy, seed)
        reference = engine_of("simpy").execute(programs)
        if found := differences(run_compiled(programs), reference):
            different.append(f"step {seed}: {', '.join(found)}")
        tasks += sum(execution.events for execution in reference)
        sends += sum(len(execution.sends) for execution in reference)
        groups += len(programs) > 1
    rows = {
        "Random steps": options.steps,
        "of them with several groups": groups,
        "Tasks": tasks,
        "Pipeline sends": sends,
        "Steps with any difference": len(different),
    }
    lines = ["# The compiled engine against SimPy", "", "| what | number |", "|---|--:|"]
    lines += [f"| {name} | {number:,} |" for name, number in rows.items()]
    lines += [
        "",
        "Every time, send, end of step and byte count is compared. `make proof` writes this table.",
        "",
    ]
    text = "\n".join([*lines, *different])
    if options.table:
        options.table.write_text(text, encoding="utf-8")
    sys.stdout.write(text + "\n")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
