"""A plan search that is limited to what a training framework can run."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
from msgspec.structs import replace

from moesim.hwmodels.errors import InfeasibleError, InputError
from moesim.simulator.layout.job import resolve
from moesim.simulator.planner.frames import legal_frames
from moesim.simulator.planner.refusals import Refusals
from moesim.simulator.planner.result import PlanResult
from moesim.simulator.planner.search import plan
from moesim.simulator.planner.space import PlanSpace, with_defaults
from moesim.simulator.planner.trainer_limits import TrainerLimits
from moesim.simulator.scenario import Scenario, load_scenario
from moesim.simulator.trainers.registry import trainer_of
from moesim.simulator.trainers.rules import facts_of

EXAMPLES = Path(__file__).parents[3] / "examples"
JOB = load_scenario(
    "deepseek-v3-2048xh800",
    [
        "model=mixtral-8x7b",
        "cluster=h100-1024",
        "cluster.nodes=8",
        "profile=",
        "batch.sequences=256",
        "parallel={ep: 8, zero_stage: 1}",
        "schedule=1f1b",
        "recompute=none",
        "precision=bf16",
        "name=mixtral on 64 H100",
    ],
)
SPACE = PlanSpace(
    tp=(1, 2), pp=(1, 2, 4), cp=(1,), ep=(1, 8), microbatch=(1,), sms=(19, 20), zero_stage=(0, 1, 2)
)


@pytest.fixture(scope="module")
def found() -> PlanResult:
    return plan(JOB, SPACE, top=3, trainer="megatron")


def test_every_ranked_plan_is_one_that_the_trainer_can_run_and_is_priced_as_it_runs_it(
    found: PlanResult,
) -> None:
    trainer = trainer_of("megatron")
    for row in (*found.ranked, *found.pareto):
        assert trainer.problems_of(row.scenario) == ()
        assert trainer.adapted(row.scenario)[1] == ()
        assert trainer.arguments(row.scenario).unspelled == ()


def test_the_best_of_all_is_named_with_what_it_would_gain(found: PlanResult) -> None:
    verdict = found.trainer
    assert verdict is not None and verdict.best_of_all is not None
    alone = plan(JOB, SPACE, top=1)
    assert verdict.best_of_all.label == alone.best.label
    assert verdict.gain == pytest.approx(1.0 - alone.best.time_s / found.best.time_s)
    assert verdict.reasons == trainer_of("megatron").problems_of(alone.best.scenario)
    assert any("software.loss=compiled" in sentence for sentence in verdict.replaced)
    assert found.to_dict()["trainer"]["best_of_all"]["schedule"] == alone.best.schedule


def _legal_one_by_one(scenario: Scenario, space: PlanSpace) -> Iterator[tuple[str, bool]]:
    """Every combination of a frame, by calling the rules on each plan alone."""
    trainer, job = trainer_of("megatron"), resolve(scenario)
    full = with_defaults(space, scenario, job.shape, job.cluster)
    frames, _ = legal_frames(full, job.shape, job.cluster, 256, scenario.batch.sequence_length, "nccl")
    for frame, p, r, s, z in product(frames, full.precision, full.recompute, full.sms, full.zero_stage):
        plan_ = scenario.model_copy(
            update={
                "parallel": frame.plan.model_copy(update={"zero_stage": z}),
                "schedule": frame.schedule,
                "precision": p,
                "recompute": r,
                "communication": scenario.communication.model_copy(update={"sms": s}),
            }
        )
        yield f"{frame.label} {p} {r} {s} {z}", not trainer.problems(facts_of(plan_))


def test_arrays_of_plans_are_limited_as_each_plan_alone() -> None:
    """The masks over arrays agree with the rules applied to one plan after the other."""
    space = PlanSpace(
        tp=(1,), pp=(1, 2), cp=(1,), ep=(1, 8), microbatch=(1,), sms=(19, 20), zero_stage=(0, 2),
        precision=("bf16", "fp8"), schedule=("1f1b", "interleaved-1f1b", "dualpipev"),
        recompute=("none", "full", "op"),
    )  # fmt: skip
    one_by_one = dict(_legal_one_by_one(JOB, space))
    trainer, job = trainer_of("megatron"), resolve(JOB)
    limits = TrainerLimits(trainer, JOB)
    full = with_defaults(space, JOB, job.shape, job.cluster)
    narrow, sentences = limits.narrowed(full)
    assert {s.partition(" ")[0] for s in sentences} == {"schedule=dualpipev", "recompute=op"}
    frames, _ = legal_frames(narrow, job.shape, job.cluster, 256, JOB.batch.sequence_length, "nccl")
    kept = limits.frames(frames, narrow.per_frame, Refusals())
    runs = limits.combinations(kept, narrow, Refusals())
    masked = {
        f"{frame.label} {p} {r} {s} {z}"
        for n, frame in enumerate(kept)
        for i, p in enumerate(narrow.precision)
        for j, r in enumerate(narrow.recompute)
        for k, s in enumerate(narrow.sms)
        for m, z in enumerate(narrow.zero_stage)
        if runs[n, i, j, k, m]
    }
    assert masked == {name for name, legal in one_by_one.items() if legal}
    assert 0 < len(masked) < len(one_by_one)


def test_values_that_the_user_named_and_the_trainer_lacks_are_said() -> None:
    result = plan(JOB, SPACE.model_copy(update={"recompute": ("none", "op")}), top=1, trainer="megatron")
    assert any("recompute=op is not searched" in note for note in result.notes)
    with pytest.raises(InfeasibleError, match="1F1B and interleaved 1F1B only"):
        plan(JOB, PlanSpace(schedule=("dualpipev",)), trainer="megatron")


def test_what_cannot_be_searched_is_refused() -> None:
    with pytest.raises(InputError, match=r"version '9' is not known; known: 0\.20, 0\.14"):
        plan(JOB, SPACE, trainer="megatron@9")
    with pytest.raises(InputError, match="a fleet's pools"):
        plan(load_scenario(str(EXAMPLES / "mixed.yaml")), trainer="megatron")


def test_a_model_that_the_trainer_cannot_train_is_infeasible() -> None:
    data = JOB.shape.model_dump(mode="json", exclude_none=True)
    data["attention"]["o_bias"] = True
    scenario = JOB.replace(model=data)
    with pytest.raises(InfeasibleError, match="biases of some of the linear layers"):
        plan(scenario, SPACE, trainer="megatron")


def test_a_search_for_memory_gains_in_bytes() -> None:
    result = plan(JOB, SPACE, objective="memory", top=1, trainer="megatron")
    verdict = result.trainer
    assert verdict is not None and verdict.best_of_all is not None
    assert verdict.gain == pytest.approx(1.0 - verdict.best_of_all.memory_bytes / result.best.memory_bytes)


def test_a_best_of_all_that_gains_nothing_is_not_praised(found: PlanResult) -> None:
    assert found.trainer is not None
    worse = replace(found.trainer, gain=-0.01, reasons=("it runs 1F1B only",))
    assert worse.sentences == ("no other plan saves more than 0.0% of the objective",)
