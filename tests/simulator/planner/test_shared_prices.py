"""What a book of prices keeps from the plans before changes no price of the next one."""

from __future__ import annotations

import random
from itertools import product

import pytest

from moesim.simulator.layout.job import resolve
from moesim.simulator.model.recompute import Recompute
from moesim.simulator.planner.prices import PriceBook
from moesim.simulator.scenario import load_scenario
from moesim.simulator.scenario.parallel import ParallelPlan

COPYING = ("software.parameters_copied=true", "software.single_groups_copied=true")
SPLITS = list(product((1, 2), (1, 2), (1, 8, 16), (1, 2)))
"""Tensor, context and expert parallelism, and tensor parallelism inside of experts."""
POLICIES: tuple[Recompute, ...] = ("none", "full", "selective", "deepseek-v3")


@pytest.mark.parametrize("software", [(), COPYING, ("communication.gemm_margin=24",)])
def test_a_table_is_that_of_a_book_which_priced_nothing_else(software: tuple[str, ...]) -> None:
    changes = ["cluster=h100-1024", "cluster.nodes=16", "profile=null", "model=qwen3-30b-a3b", *software]
    scenario = load_scenario("deepseek-v3-2048xh800", [*changes, "routing=null", "parallel.pp=4"])
    job = resolve(scenario)
    assert job.profile.power is not None, "the clock by the load is not tried"
    choices = list(product(SPLITS, (0, 2, 3), (1, 2), POLICIES, (16, 24)))
    random.Random(7).shuffle(choices)
    book = PriceBook(scenario, job.shape, job.cluster, job.profile)
    for split, zero_stage, microbatch, policy, sms in choices[:60]:
        tp, cp, ep, expert_tp = split
        plan = ParallelPlan(
            pp=4, tp=tp, cp=cp, ep=ep, expert_tp=expert_tp, microbatch=microbatch, zero_stage=zero_stage
        )
        fresh = PriceBook(scenario, job.shape, job.cluster, job.profile)
        recipe = scenario.recipe
        table, expected = (b.table(plan, recipe, policy, sms, zero_stage < 3) for b in (book, fresh))
        assert table == expected, (plan, policy, sms)
        alone, expected = (b.alone(plan, recipe, policy, sms) for b in (book, fresh))
        assert alone == expected, (plan, policy, sms)
