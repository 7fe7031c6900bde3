"""What prices stand on travels with them: sums, blends, equality, and one price of each operator."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesim.hwmodels.accelerator import Accelerator, load_accelerator
from moesim.hwmodels.calibration import CalibrationProfile, load_profile
from moesim.simulator.common.bounded_cache import clear_caches
from moesim.simulator.cost import pricing
from moesim.simulator.cost.compute import OperatorCost, SmContext, operator_seconds, operators_seconds
from moesim.simulator.cost.cost_table import cost_table
from moesim.simulator.cost.end_of_step import pass_seconds
from moesim.simulator.cost.evidence import (
    NOT_PRICED,
    EntryReading,
    Evidence,
    PartEvidence,
    combined,
    evidence_text,
    model_evidence,
)
from moesim.simulator.cost.table import PhaseCost, blend
from moesim.simulator.model.catalogue import load_model, shipped_models
from moesim.simulator.model.operator import Operator
from moesim.simulator.predict.placement import block_seconds
from moesim.simulator.predict.step import prepare
from moesim.simulator.scenario import Scenario, load_scenario

ONE = Evidence(frozenset({"a", "law"}), frozenset({"held"}), (EntryReading("a", 2.0, 0.2),))
TWO = Evidence(
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


# -- What prices the parts of a model in a profile ----------------------------------------------


def parts(model: str, profile: str, accelerator: str) -> dict[str, PartEvidence]:
    found = model_evidence(load_model(model), load_accelerator(accelerator), load_profile(profile))
    return {part.part: part for part in found}


def test_a_trace_measured_the_attention_that_it_shows() -> None:
    found = parts("deepseek-v3", "h800-trace", "h800-sxm")
    assert found["mla"].evidence == "measured" and found["mla"].share == 1.0
    assert found["mla"].entries[0] == "h800-trace.attention_backward"
    assert found["router"].entries == tuple(e for e in found["router"].entries if "h800-trace" in e)
    assert set(found) == {"mla", "projections", "experts", "router"}


def test_datasheet_peaks_are_assumptions() -> None:
    found = parts("qwen3-30b-a3b", "generic-roofline", "h100-sxm")
    assert {part.evidence for part in found.values()} == {"assumed"}


def test_a_part_without_rate_and_prior_is_named() -> None:
    profile = load_profile("h800-trace")
    bare: CalibrationProfile = profile.model_copy(
        update={
            "curves": tuple(c for c in profile.curves if "attention_forward" not in c.used_for),
            "priors": (),
        }
    )
    found = model_evidence(load_model("deepseek-v3"), load_accelerator("h800-sxm"), bare)
    attention = next(part for part in found if part.part == "mla")
    assert attention.evidence == NOT_PRICED and "attention_forward" in attention.entries[0]
    assert "not priced: mla" in evidence_text(found)


@pytest.mark.parametrize("name", shipped_models())
def test_every_part_of_a_shipped_model_is_priced(name: str) -> None:
    found = parts(name, "h200-8gpu", "h200-sxm")
    assert NOT_PRICED not in {part.evidence for part in found.values()}, evidence_text(found.values())
    assert all(0.0 < part.share <= 1.0 for part in found.values())
