"""A small job and the candidates of a space, which several tests of the planner share."""

from __future__ import annotations

from moesim.simulator.layout.job import resolve
from moesim.simulator.planner.candidate_search import CandidateSearch
from moesim.simulator.planner.candidates import find_candidates
from moesim.simulator.planner.plan_arrays import Candidates
from moesim.simulator.planner.space import PlanSpace, with_defaults
from moesim.simulator.scenario import Scenario, load_scenario


def small_job(*overrides: str) -> Scenario:
    """Qwen3-30B-A3B on 32 H200: a search of some dozen plans takes a second."""
    return load_scenario(
        "deepseek-v3-2048xh800",
        [
            "name=small",
            "model=qwen3-30b-a3b",
            "cluster={node: hgx-h200, nodes: 4, network: mrft-ib-400g, price_per_gpu_hour: $2.5/h}",
            "profile=h200-measured",
            "precision=bf16",
            "parallel={pp: 4, ep: 8, zero_stage: 1}",
            "schedule=1f1b",
            "batch.sequences=256",
            "recompute=selective",
            "run.tokens=1e11",
            *overrides,
        ],
    )


def candidates_of(scenario: Scenario, wanted: PlanSpace) -> tuple[Candidates, CandidateSearch]:
    """The plans of a space that are legal and fit, and the search over them."""
    job = resolve(scenario)
    found = find_candidates(job, with_defaults(wanted, scenario, job.shape, job.cluster))
    return found, CandidateSearch(scenario, job.shape, found)
