"""What prices the parts of a model in a profile."""

from __future__ import annotations

import pytest

from moesim.hwmodels.accelerator import load_accelerator
from moesim.hwmodels.calibration import CalibrationProfile, load_profile
from moesim.simulator.cost.price_evidence import NOT_PRICED, PartEvidence, evidence_text, model_evidence
from moesim.simulator.model.catalogue import load_model, shipped_models


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


def test_a_dense_model_has_no_experts_to_price() -> None:
    assert set(parts("qwen3-8b", "h800-trace", "h800-sxm")) == {"gqa", "projections"}


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
