"""Compares the compiled engine with SimPy, and writes the table of lab/docs/proof/engines.md.

Random steps, random prepared scenarios, every shipped scenario, and rates against max-min fairness.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

from prepared_steps import prove_prepared, prove_presets
from random_steps import Toy, differences, random_step
from shared_links import random_case, run_case

from moesim.simulator.engine.compiled import links, memory
from moesim.simulator.engine.compiled.engine import run_compiled
from moesim.simulator.engine.compiled.memory import as_run
from moesim.simulator.engine.compiled.state import STEP_LAYOUT, RunState, Tables
from moesim.simulator.engine.registry import engine_of

MOST_FLOWS = 14
"""Most flows of a random case of link sharing, more than in CI."""


class CompiledLinks:
    """Calls the same functions compiled; a process compiles them once, in some seconds."""

    _functions: tuple[Any, Any] | None = None

    def __init__(self, tables: Tables, state: RunState) -> None:
        """Over the arrays of a run."""
        self.table = STEP_LAYOUT.addresses(tables, state)
        self.address = int(self.table.__array_interface__["data"][0])
        if CompiledLinks._functions is None:
            CompiledLinks._functions = _compiled_functions()

    def begin(self, *arguments: Any) -> None:
        """Start a flow."""
        assert self._functions is not None
        self._functions[0](self.address, *arguments)

    def next_end(self) -> int:
        """Take the next event; return the flow that has ended at it, or -1."""
        assert self._functions is not None
        return int(self._functions[1](self.address))


def _compiled_functions() -> tuple[Any, Any]:
    import numba

    begin_flow, end_flow, take_first = links.begin_flow, links.end_flow, memory.take_first
    kinds, deadline = memory.KINDS, memory.DEADLINE

    def begin(address: int, owner: int, alone: float, first: int, width: int, slot: int) -> None:
        begin_flow(as_run(address), owner, alone, first, width, slot)

    def next_end(address: int) -> int:
        run = as_run(address)
        place = take_first(run)
        flow = run.queue_what[place] // kinds
        if run.queue_what[place] % kinds == deadline and run.queue_extra[place] == run.flow_version[flow]:
            end_flow(run, flow)
            return int(flow)
        return -1

    strict = numba.njit(error_model="numpy", fastmath=False)
    return strict(begin), strict(next_end)


def toy_of_conftest() -> Toy:
    """`build_toy`, for a program that is no test."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tests"))
    from conftest import build_toy

    toy: Toy = build_toy
    return toy


def main() -> int:
    """Run the comparisons; the exit status is 1 where any record differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--prepared", type=int, default=200)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--presets", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--table", type=Path)
    options = parser.parse_args()
    began = time.monotonic()
    parts = [prove_steps(options.steps), prove_prepared(options.prepared), prove_rates(options.cases)]
    if options.presets:
        parts.append(prove_presets(_say))
    different = [reason for _, found in parts for reason in found]
    lines = ["# The compiled engine against SimPy", "", "| what | number |", "|---|--:|"]
    lines += [f"| {name} | {number:,} |" for rows, _ in parts for name, number in rows.items()]
    presets = "" if options.presets else " --no-presets"
    lines += [
        "",
        "Every time, send, end of step and byte count is compared, and the rates of the compiled functions",
        "of links with the definition of max-min fairness ([chapter 7](../../../docs/model/07-time.md), eq.",
        "E3) after every start and end of a flow. `make proof` writes this table. These numbers are of",
        f"`prove_engines.py --steps {options.steps} --prepared {options.prepared} "
        f"--cases {options.cases}{presets}`,",
        f"which took {(time.monotonic() - began) / 60:.0f} minutes with Python {platform.python_version()}",
        f"on {os.cpu_count()} {platform.machine()} cores.",
        "",
    ]
    text = "\n".join([*lines, *different])
    if options.table:
        options.table.write_text(text, encoding="utf-8")
    sys.stdout.write(text + "\n")
    return 1 if different else 0


def prove_steps(count: int) -> tuple[dict[str, int], list[str]]:
    """Compare every record of random steps; return rows of the table and what differs, in words."""
    toy, tasks, sends, groups, different = toy_of_conftest(), 0, 0, 0, []
    for seed in range(count):
        programs = random_step(toy, seed)
        reference = engine_of("simpy").execute(programs)
        if found := differences(run_compiled(programs), reference):
            different.append(f"step {seed}: {', '.join(found)}")
        tasks += sum(execution.events for execution in reference)
        sends += sum(len(execution.sends) for execution in reference)
        groups += len(programs) > 1
    rows = {
        "Random steps": count,
        "of them with several groups": groups,
        "Tasks of random steps": tasks,
        "Pipeline sends of random steps": sends,
        "Random steps with any difference": len(different),
    }
    return rows, different


def prove_rates(count: int) -> tuple[dict[str, int], list[str]]:
    """Compare the rates of compiled link sharing with max-min fairness, half of the cases a solver."""
    looks, slowed, different = 0, 0, []
    for seed in range(count):
        outcome = run_case(random_case(seed, MOST_FLOWS), seed % 2 == 0, CompiledLinks)
        looks, slowed = looks + outcome.looks, slowed + outcome.slowed
        different += [f"links {seed}: {outcome.wrong[0]}"] if outcome.wrong else []
    rows = {
        "Random cases of flows on links": count,
        "Starts and ends of flows after which all rates were compared": looks,
        "Flows then that a link slowed": slowed,
        "Cases with any unfair rate": len(different),
    }
    return rows, different


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")


if __name__ == "__main__":
    sys.exit(main())
