from __future__ import annotations

from typing import Any

import pytest

from moesim.hwmodels import Cluster, load_accelerator, load_cluster, validate_model
from moesim.hwmodels.calibration import CalibrationProfile, load_profile
from moesim.hwmodels.confidence import (
    GENERIC,
    best_profile,
    compute_units_text,
    confidence,
    confidence_statement,
    efficiency_prior,
    missing_figures,
    peak_only_note,
    rate_tables,
)


def cluster_of(accelerator: str) -> Cluster:
    node = load_cluster("h200-8").node.model_dump(mode="json", exclude_none=True)
    data: dict[str, Any] = {"node": node | {"accelerator": accelerator}, "nodes": 1, "network": "single-node"}
    return validate_model(Cluster, data, "test")


@pytest.mark.parametrize(
    ("accelerator", "profile", "dtype", "level"),
    [
        ("h800-sxm", "h800-trace", "fp8", "measured"),
        ("h800-sxm", "h800-trace", "bf16", "published"),  # these products were measured on H200
        ("h800-sxm", "h800-published", "fp8", "published"),  # derived from published tables
        ("h200-sxm", "h200-measured", "bf16", "measured"),
        ("h100-sxm", "h200-measured", "bf16", "published"),  # argued from a sibling
        ("a100-sxm", "a100-layers", "bf16", "measured"),
        ("gb200", "gb200-layers", "fp8", "published"),  # the quantisation was subtracted
        ("mi300x", GENERIC, "bf16", "published"),  # its best product was measured
        ("mi355x", GENERIC, "fp8", "peak-only"),  # in BF16 only
        ("tpu-v5p", GENERIC, "bf16", "peak-only"),
    ],
)
def test_levels(accelerator: str, profile: str, dtype: str, level: str) -> None:
    cluster, loaded = cluster_of(accelerator), load_profile(profile)
    assert confidence(cluster, loaded, dtype) == level
    assert confidence_statement(cluster, loaded, dtype).startswith(level)
    assert bool(rate_tables(loaded, dtype)) == (profile != GENERIC)


def test_the_weakest_of_the_first_tables_decides() -> None:
    profile = load_profile("h800-trace")
    table = rate_tables(profile, "fp8")[0]
    assumed = table.model_copy(update={"kind": "assumed"})
    weaker = profile.model_copy(update={"gemm_tables": (assumed, *profile.gemm_tables)})
    assert confidence(cluster_of("h800-sxm"), weaker, "fp8") == "published"
    # A second table of the same class and format is never read, so it decides nothing.
    behind = profile.model_copy(update={"gemm_tables": (*profile.gemm_tables, assumed)})
    assert confidence(cluster_of("h800-sxm"), behind, "fp8") == "measured"


def test_a_peak_only_statement_holds_the_prior_its_range_and_its_source() -> None:
    cluster, profile = cluster_of("tpu-v5p"), load_profile(GENERIC)
    text = confidence_statement(cluster, profile)
    prior = "0.7 (0.5 to 0.85) of the bf16 datasheet peak of tpu-v5p (generic-priors.gemm: "
    assert text.startswith(f"peak-only, efficiency prior {prior}")
    assert peak_only_note(cluster, profile) == (text,)
    assert peak_only_note(cluster_of("h800-sxm"), load_profile("h800-trace"), "fp8") == ()
    assert "0.89 (0.75 to 1) of the bf16 best measured product of mi300x" in confidence_statement(
        cluster_of("mi300x"), profile
    )


def test_a_profile_without_rates_says_so() -> None:
    empty: CalibrationProfile = load_profile(GENERIC).model_copy(update={"priors": ()})
    assert efficiency_prior(load_accelerator("h20"), empty) is None
    assert confidence_statement(cluster_of("h20"), empty).startswith(
        "peak-only: profile generic-roofline has no rate of bf16"
    )


def test_missing_figures_and_units() -> None:
    assert missing_figures(load_accelerator("m3-ultra"))[:2] == ("peak.bf16", "scale_up_bandwidth")
    assert missing_figures(load_accelerator("h100-sxm")) == ()
    assert "compute_units" in missing_figures(load_accelerator("mtt-s5000"))
    assert "compute_units" not in missing_figures(load_accelerator("tpu-v5p"))  # an engine moves collectives
    assert compute_units_text(load_accelerator("ascend-910c")) == "48 cube cores"
    assert compute_units_text(load_accelerator("mtt-s5000")) == "? MPs"


def test_best_profile_prefers_the_stronger_and_then_the_fuller() -> None:
    assert best_profile(load_accelerator("h800-sxm")) == ("measured", "h800-trace")
    assert best_profile(load_accelerator("gb200")) == ("measured", "gb200-layers")
    assert best_profile(load_accelerator("gb200"), "fp8") == ("published", "gb200-layers")
    assert best_profile(load_accelerator("mi355x"), "fp8") == ("peak-only", GENERIC)
    assert best_profile(load_accelerator("h20")) == ("peak-only", GENERIC)
