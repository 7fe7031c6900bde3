"""What the planner claims over tuned plans: the surroundings that are searched, and the share of each key."""

from __future__ import annotations

import re

import pytest
from lab.writers.gap_board import line_of

import moesim
from moesim.cli import main
from moesim.hwmodels.errors import InputError
from moesim.simulator.scenario import Scenario, load_scenario
from moesim.simulator.scoring import expert_gap
from moesim.simulator.scoring.expert_gap import (
    ExpertGap,
    TunedPlan,
    ablated,
    around,
    gap_of,
    summary,
    trainer_named,
    tuned_plans,
)
from moesim.simulator.scoring.scoreboard import open_rows

SMALL = {
    "model": "llama-3-8b",
    "cluster": {"accelerator": "h100-sxm", "nodes": 1},
    "parallel": {"tp": 2, "pp": 2, "zero_stage": 1, "sequence_parallel": True},
    "schedule": "1f1b",
    "precision": "bf16",
    "batch": {"sequences": 8, "sequence_length": 2048},
    "recompute": "none",
    "software": {"framework": "megatron-core-0.17"},
}


@pytest.fixture(scope="module")
def small() -> Scenario:
    return load_scenario(SMALL)


def test_every_tuned_plan_is_a_row_or_a_preset_of_a_known_trainer() -> None:
    rows = {row.id for row in open_rows()}
    plans = tuned_plans()
    assert len(plans) >= 10 and len({plan.id for plan in plans}) == len(plans)
    for plan in plans:
        assert plan.id in rows or load_scenario(plan.id).name == plan.id
        assert plan.team and (not plan.trainer or trainer_named(plan.trainer) is not None)


def test_the_surroundings_halve_and_double_every_degree_and_keep_the_precision(small: Scenario) -> None:
    space = around(small, trainer_named("megatron@0.20"))
    assert (space.tp, space.pp, space.cp, space.microbatch) == ((1, 2, 4), (1, 2, 4), (1, 2), (1, 2))
    assert set(space.vpp or ()) == {1, 2} and space.precision == ("bf16",) and space.ep is None
    assert space.recompute is not None and {"none", "full", ("mlp",)} <= set(space.recompute)
    moe = load_scenario("deepseek-v3-2048xh800")
    assert around(moe, None).ep == (32, 64, 128)


def _seconds(scenario: Scenario) -> float | None:
    """A step by hand: TP2 costs 2 s, ZeRO-1 costs 1 s, and PP1 is legal only with TP1."""
    plan = scenario.parallel
    if plan.pp == 1 and plan.tp > 1:
        return None
    return 5.0 + 2.0 * (plan.tp > 1) + 1.0 * (plan.zero_stage == 1) - 0.5 * (plan.pp == 1)


def test_shares_add_up_and_keys_change_in_the_order_of_what_they_save(small: Scenario) -> None:
    winner = small.overridden("parallel.tp=1", "parallel.pp=1", "parallel.zero_stage=3")
    shares = ablated(small, winner, _seconds)
    assert [share.keys for share in shares] == [("tp",), ("zero_stage",), ("pp",)]
    assert [share.saved for share in shares] == pytest.approx([2 / 8, 1 / 8, 0.5 / 8])
    assert str(shares[0]) == "tp 2 -> 1 (+25.0%)"
    # Keys that are legal only together change together.
    both = ablated(small, winner, lambda s: None if (s.parallel.tp == 2) != (s.parallel.pp == 2) else 1.0)
    assert [share.keys for share in both] == [("zero_stage",), ("tp", "pp")]


def test_a_small_claim_end_to_end(small: Scenario, monkeypatch: pytest.MonkeyPatch) -> None:
    space = moesim.PlanSpace(
        tp=(1, 2), pp=(1, 2), cp=(1,), vpp=(1,), microbatch=(1,), zero_stage=(1,), recompute=("none",)
    )
    monkeypatch.setattr(expert_gap, "around", lambda *_: space)
    monkeypatch.setattr(expert_gap, "scenario_of", lambda tuned: small)
    gap = gap_of(TunedPlan(id="small", trainer="megatron@0.20", team="us"))
    assert gap.gain is not None and gap.tuned_s is not None and gap.winner_s is not None
    assert gap.gain == pytest.approx(gap.tuned_s / gap.winner_s - 1.0) and gap.gain >= 0.0
    assert gap.tuned == "TP2 PP2 MBS1 ZeRO-1 none"
    assert sum(share.saved for share in gap.shares) == pytest.approx(1.0 - gap.winner_s / gap.tuned_s)


def test_a_tuned_plan_that_is_predicted_not_to_fit_is_not_comparable(
    small: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = small.overridden("batch.sequence_length=131072", "parallel.microbatch=2")
    monkeypatch.setattr(expert_gap, "scenario_of", lambda tuned: large)
    monkeypatch.setattr(expert_gap, "winner_of", lambda *_: pytest.fail("nothing to compare with"))
    gap = gap_of(TunedPlan(id="large", trainer="megatron@0.20", team="us"))
    assert gap.gain is None and gap.tuned_s is not None and gap.tuned.startswith("TP2 PP2 MBS2")
    assert re.match(r"not comparable: it ran and is predicted not to fit \([\d.]+ of 80.0 GiB\)", gap.refused)
    line = line_of(gap)
    assert (line["tuned"], line["shares"], line.get("gain")) == (gap.tuned, gap.refused, None)
    assert summary([gap]) == {"plans": 0}


def test_the_summary_leaves_out_what_was_not_searched() -> None:
    def gap(gain: float | None) -> ExpertGap:
        return ExpertGap(id="a", title="", trainer="", team="", remark="", gain=gain)

    assert summary([gap(0.0), gap(None), gap(0.1), gap(0.04)]) == {"plans": 3, "median": 0.04, "worst": 0.1}
    assert summary([gap(None)]) == {"plans": 0}


def test_unknown_plans_and_contradictions_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match=r"'mbridge-1244' is no tuned plan.*mbridge-124"):
        list(expert_gap.expert_gaps(["mbridge-1244"]))
    for arguments in (["--expert-gap", "--all"], ["--parts", "--expert-gap"], ["--tuned", "mbridge-124"]):
        with pytest.raises(SystemExit) as stopped:
            main(["validate", *arguments])
        assert stopped.value.code == 2
    assert "--expert-gap" in capsys.readouterr().err
