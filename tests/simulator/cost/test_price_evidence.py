"""What prices stand on travels with them: sums, blends, equality, and one price of each operator."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesim.hwmodels.accelerator import Accelerator
from moesim.hwmodels.calibration import CalibrationProfile
from moesim.simulator.common.bounded_cache import clear_caches
from moesim.simulator.cost import pricing
from moesim.simulator.cost.compute import OperatorCost, SmContext, operator_seconds, operators_seconds
from moesim.simulator.cost.end_of_step import pass_seconds
from moesim.simulator.cost.price_evidence import EntryReading, PriceEvidence, combined
from moesim.simulator.cost.price_table import cost_table
from moesim.simulator.cost.table import PhaseCost, blend
from moesim.simulator.model.operator import Operator
from moesim.simulator.predict.placement import block_seconds
from moesim.simulator.predict.step import prepare
from moesim.simulator.scenario import Scenario, load_scenario

ONE = PriceEvidence(frozenset({"a", "law"}), frozenset({"held"}), (EntryReading("a", 2.0, 0.2),))
TWO = PriceEvidence(
    frozenset({"a", "b"}), frozenset({"assumed"}), (EntryReading("a", 1.0, 0.4), EntryReading("b", 3.0, 0.3))
)


def test_a_sum_of_prices_stands_on_what_its_parts_stand_on() -> None:
    both = ONE | TWO
    assert both.entries == {"a", "b", "law"} and both.notes == {"held", "assumed"}
    assert both.mean_errors() == pytest.approx({"a": 0.6 / 3.0, "b": 0.1})


@given(st.integers(1, 50), st.integers(1, 50))
def test_a_mean_error_is_by_seconds_however_often_a_price_counts(once: int, more: int) -> None:
    mean = combined(((ONE, once), (TWO, more))).mean_errors()["a"]
    assert mean == pytest.approx((0.2 * once + 0.4 * more) / (2.0 * once + 1.0 * more))
    assert combined(((ONE, once),)).mean_errors()["a"] == pytest.approx(0.1)


def test_a_blend_weighs_both_modes_by_their_share() -> None:
    mixed = blend(PhaseCost(2.0, evidence=ONE), PhaseCost(4.0, evidence=TWO), 0.25)
    assert mixed.fixed_s == 2.5
    assert mixed.evidence.entries == {"a", "b", "law"}
    assert mixed.evidence.mean_errors()["a"] == pytest.approx((0.75 * 0.2 + 0.25 * 0.4) / (1.5 + 0.25))


def test_prices_with_the_same_seconds_are_equal_whatever_they_stand_on() -> None:
    one, two = PhaseCost(1.0, evidence=ONE), PhaseCost(1.0, evidence=TWO)
    assert one == two and hash(one) == hash(two)
    assert replace(one, fixed_s=2.0).evidence is ONE


def test_asking_for_a_price_again_changes_no_evidence(small: Scenario) -> None:
    prepared = prepare(small)
    before = prepared.program.costs.evidence
    for kind in ("dense", "moe"):
        block_seconds(prepared.pricer, kind)
        pass_seconds(prepared.pricer, kind)
    again = cost_table(prepared.pricer, prepared.schedule, prepared.stages)
    assert prepared.program.costs.evidence == before == again.evidence


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("software.overlap_data_parallel=true", "parallel.cp=2"),
        ("software.host=xeon-8480c", "recompute=full"),
        ("parallel.zero_stage=3", "schedule=1f1b"),
    ],
)
def test_each_operator_of_a_scenario_is_priced_once(
    overrides: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Operator, SmContext]] = []

    def counted(
        operators: Iterable[Operator],
        accelerator: Accelerator,
        profile: CalibrationProfile,
        context: SmContext,
    ) -> tuple[OperatorCost, ...]:
        listed = tuple(operators)
        asked.extend((op, context) for op in listed)
        return operators_seconds(listed, accelerator, profile, context)

    monkeypatch.setattr(pricing, "operators_seconds", counted)
    clear_caches()  # an earlier test may have priced the same scenario
    prepared = prepare(load_scenario("tests/golden/scenario-small.yaml", overrides))
    assert {op.name for op, _ in asked} > {"gate"}
    different = {(id(op), context) for op, context in asked}  # two ranks may have equal optimizers
    assert len(asked) == len(different)
    accelerator, profile = prepared.cluster.accelerator, prepared.profile
    for op, context in asked:
        used = operator_seconds(op, accelerator, profile, context).evidence
        assert used.entries <= prepared.program.costs.evidence.entries, op.name


def test_collectives_inside_a_layer_name_the_curve_of_their_rings() -> None:
    """Without data parallelism these rings are all there is: all eight GPUs hold one replica."""
    overrides = [
        "cluster={node: hgx-h200, nodes: 1, network: ft3-ib-400g, name: h200}", "profile=h200-8gpu",
        "precision=bf16", "batch={sequences: 8, sequence_length: 256}", "model=llama-3-8b", "schedule=1f1b",
        "parallel={tp: 8, pp: 1, ep: 1, microbatch: 1, zero_stage: 1, sequence_parallel: true}",
    ]  # fmt: skip
    prepared = prepare(load_scenario("deepseek-v3-2048xh800", overrides))
    assert prepared.layout.dp == 1
    costs = prepared.program.costs
    assert "collective.scale_up_fraction" in costs.compute["dense", "attn F", "alone"].evidence.entries
    assert "collective.scale_up_fraction" not in costs.compute["head", "mlp F", "alone"].evidence.entries
    assert "collective.nic_fraction" not in costs.evidence.entries
