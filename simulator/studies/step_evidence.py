"""Calibration evidence of a step's prices, weighted by how often the step uses each (pure)."""

from __future__ import annotations

from collections import Counter

from moesim.simulator.cost.price_evidence import PriceEvidence, combined
from moesim.simulator.engine.program import Program


def step_evidence(program: Program) -> PriceEvidence:
    """Evidence of all compute of a program, with its readings weighted by seconds of the step.

    All blocks, micro-batches and pipeline ranks and the ends of the step count, with their seconds at even
    load and without waits.
    """
    templates = {id(step.code): step.code for steps in program.ranks for step in steps}
    runs = Counter(id(step.code) for steps in program.ranks for step in steps)
    prices = {id(task.price): task.price for code in templates.values() for task in code.tasks}
    times: Counter[int] = Counter()
    for number, code in templates.items():
        for task in code.tasks:
            times[id(task.price)] += runs[number]
    return combined(
        [
            *((price.evidence, times[number]) for number, price in prices.items()),
            *((sync.evidence, 1) for sync in program.costs.sync),
        ]
    )
