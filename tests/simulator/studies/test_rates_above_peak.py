"""The high end of a measurement's error is cut at the datasheet peak; a measurement above it is refused."""

from __future__ import annotations

import pytest

import moesim
from moesim.hwmodels.calibration import load_profile
from moesim.hwmodels.errors import InputError
from moesim.simulator.studies.sources import shifted

JOB = {
    "model": "llama-3-8b", "cluster": {"accelerator": "h100-sxm", "nodes": 1}, "parallel": {"zero_stage": 1},
    "batch": {"sequences": 8, "sequence_length": 4096}, "precision": "bf16",
}  # fmt: skip


def test_an_error_that_reaches_above_the_peak_is_cut_there() -> None:
    from moesim.hwmodels.validation import validate_model
    from moesim.simulator.scenario import Scenario

    job = validate_model(Scenario, JOB, "job")
    profile = load_profile("h100-layers")
    table = next(t for t in profile.gemm_tables if t.dtype == "bf16")
    fast = shifted(profile, table.id, -0.6, 132)
    assert fast._hypothetical and not profile._hypothetical
    quick = moesim.simulate(job.model_copy(update={"profile": fast}))
    assert quick.step.mfu_causal < 1.0
    with pytest.raises(InputError, match="correct the entry"):
        moesim.simulate(job.model_copy(update={"profile": fast.model_validate(fast.model_dump())}))
