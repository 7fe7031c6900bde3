"""Simulates the ten best plans of each preset's search again, from their files, as a user would.

    python tests/simulator/planner/prove_plans.py [PRESET ...]

Every plan must take the printed seconds within 0.1 %, fit as its row says, and keep no link busy for longer
than its step. A fault ends the proof with exit code 1.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import moesim
from moesim.hwmodels.errors import InfeasibleError
from moesim.simulator.planner.result import PlanResult, PlanRow, step_text
from moesim.simulator.scenario import Scenario, preset_names

TOLERANCE = 1e-3
"""Relative difference between the printed and the simulated step."""


def faults_of(found: PlanResult) -> list[str]:
    """What is wrong with the ranked plans of a search, a sentence each."""
    return [fault for row in found.ranked for fault in _faults(row, found.headroom)]


def _faults(row: PlanRow, headroom: float | None) -> list[str]:
    scenario = Scenario.model_validate(row.to_dict()["scenario"])
    result = moesim.simulate(scenario)
    step_s, printed_s = result.step.time_s, float(step_text(row.time_s))
    faults = []
    if abs(step_s / printed_s - 1.0) > TOLERANCE:
        faults.append(f"{row.label} takes {step_s:.6g} s, and {printed_s} s are printed")
    if (result.memory.verdict, result.memory.total_bytes) != (row.verdict, row.memory_bytes):
        faults.append(f"{row.label} is said to be {row.verdict}, but simulated it is {result.memory.verdict}")
    if headroom is None and row.verdict != "fits":
        faults.append(f"{row.label} is {row.verdict} in a search that keeps a head-room")
    for link, busy in (("NIC", result.utilisation.nic), ("scale-up port", result.utilisation.scale_up)):
        if busy > 1.0:
            faults.append(
                f"{row.label}: a {link} is busy for {busy * step_s:.3f} s of a step of {step_s:.3f} s"
            )
    return faults


def main(arguments: Sequence[str] | None = None) -> int:
    """Prove the presets that are named, or all of them; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("presets", nargs="*")
    given = parser.parse_args(arguments)
    faults = 0
    for name in given.presets or preset_names():
        scenario = moesim.load(name)
        if scenario.stages.blocks is not None:
            print(f"{name}: a part of a model has no plans", flush=True)
            continue
        try:
            found = moesim.plan(scenario, top=10)
        except InfeasibleError as error:
            print(f"{name}: {error}", flush=True)
            continue
        wrong = faults_of(found)
        faults += len(wrong)
        best = f"{found.best.label} ZeRO {found.best.zero_stage}, {step_text(found.best.time_s)} s"
        print(f"{name}: {best}; {len(found.ranked)} plans simulated again, {len(wrong)} faults", flush=True)
        for fault in wrong:
            print(f"  {fault}", flush=True)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
