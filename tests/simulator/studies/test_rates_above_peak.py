"""Shifted profiles: an error is cut at the datasheet peak, and kept prices are those of pricing anew."""

from __future__ import annotations

import pytest

import moesim
from moesim.hwmodels.calibration import load_profile
from moesim.hwmodels.errors import InputError
from moesim.simulator.cost.price_table import cost_table
from moesim.simulator.predict.step import prepare
from moesim.simulator.scenario import Scenario
from moesim.simulator.studies.sources import shifted

JOB = {
    "model": "llama-3-8b", "cluster": {"accelerator": "h100-sxm", "nodes": 1}, "parallel": {"zero_stage": 1},
    "batch": {"sequences": 8, "sequence_length": 4096}, "precision": "bf16",
}  # fmt: skip


def test_an_error_that_reaches_above_the_peak_is_cut_there() -> None:
    from moesim.hwmodels.validation import validate_model

    job = validate_model(Scenario, JOB, "job")
    profile = load_profile("h100-layers")
    table = next(t for t in profile.gemm_tables if t.dtype == "bf16")
    fast = shifted(profile, table.id, -0.6, 132)
    assert fast._shifted_from == (profile, table.id) and profile._shifted_from is None
    quick = moesim.simulate(job.model_copy(update={"profile": fast}))
    assert quick.step.mfu_causal < 1.0
    with pytest.raises(InputError, match="correct the entry"):
        moesim.simulate(job.model_copy(update={"profile": fast.model_validate(fast.model_dump())}))


def test_prices_kept_from_before_a_shift_are_those_of_pricing_everything_again(small: Scenario) -> None:
    """Phases that do not depend on the shifted entry keep their prices; a copy of the profile keeps none."""
    prepared = prepare(small)
    own = prepared.profile
    before = cost_table(prepared.pricer, prepared.schedule, prepared.stages)
    changed = 0
    for entry in (*sorted(before.evidence.entries)[::3], "launch_gap", "kernel_floor"):
        tables = [
            cost_table(
                pricer.at_rates(profile=shifted(profile, entry, 0.1, 132)), prepared.schedule, prepared.stages
            )
            for pricer, profile in ((prepared.pricer, own), (prepared.pricer, own.model_copy()))
        ]
        assert tables[0] == tables[1]
        changed += tables[0].compute != before.compute
    assert changed >= 3
