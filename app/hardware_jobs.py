"""The functions of plain arguments that job processes run for the pages Hardware and Curves."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from moesim.app import budget
from moesim.app.predictions import Progress
from moesim.hwmodels.errors import InputError
from moesim.simulator.planner.hardware import ClusterPlan, Search, plan_on
from moesim.simulator.planner.other_cluster import on_cluster
from moesim.simulator.scenario import Scenario


def best_on(
    scenario: Scenario, name: str, gpus: int | None, search: Search, progress: Progress
) -> ClusterPlan:
    """The best plan of the scenario's job on one cluster; raises InputError above the dashboard's limits."""
    there = None
    with suppress(InputError):  # the plan says then why there is none
        there = on_cluster(scenario, name, gpus)
    if there is not None:
        budget.admit(there)
    say: Any = progress
    return plan_on(scenario, name, gpus, search=search, progress=say)
