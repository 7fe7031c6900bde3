from __future__ import annotations

from typing import Any

import pytest

from moesim.hwmodels import Cluster, load_accelerator, load_cluster, validate_model
from moesim.hwmodels.calibration import CalibrationProfile, load_profile
from moesim.hwmodels.confidence import (
    GENERIC,
    best_profile,
    confidence,
    efficiency_prior,
    missing_figures,
    peak_only_note,
    statement,
    units,
)


def cluster_of(accelerator: str) -> Cluster:
    node = load_cluster("h200-8").node.model_dump(mode="json", exclude_none=True)
    data: dict[str, Any] = {"node": node | {"accelerator": accelerator}, "nodes": 1, "network": "single-node"}
    return validate_model(Cluster, data, "test")


@pytest.mark.parametrize(
    ("accelerator", "profile", "level"),
    [
        ("h800-sxm", "h800-trace", "measured"),
        ("h800-sxm", "h800-published", "published"),  # derived from published tables
        ("h800-sxm", "h800-from-h200", "published"),  # carried over by rule
        ("h200-sxm", "h200-measured", "measured"),
        ("h100-sxm", "h200-measured", "published"),  # argued from a sibling
        ("a100-sxm", "a100-layers", "measured"),
        ("gb200", "gb200-layers", "published"),  # the quantisation of its FP8 rows was subtracted
        ("mi300x", GENERIC, "published"),  # its best product was measured
        ("h20", GENERIC, "peak-only"),
        ("tpu-v5p", GENERIC, "peak-only"),
        ("ascend-910c", GENERIC, "peak-only"),
    ],
)
def test_levels(accelerator: str, profile: str, level: str) -> None:
    cluster, loaded = cluster_of(accelerator), load_profile(profile)
    assert confidence(cluster, loaded) == level
    assert statement(cluster, loaded).startswith(level)


def test_the_weakest_of_the_first_tables_decides() -> None:
    profile = load_profile("h800-trace")
    table = profile.gemm_tables[0].model_copy(update={"kind": "assumed"})
    weaker = profile.model_copy(update={"gemm_tables": (table, *profile.gemm_tables[1:])})
    assert confidence(cluster_of("h800-sxm"), weaker) == "published"
    # A second table of the same class and format is never read, so it decides nothing.
    behind = profile.model_copy(update={"gemm_tables": (*profile.gemm_tables, table)})
    assert confidence(cluster_of("h800-sxm"), behind) == "measured"


def test_a_peak_only_statement_holds_the_prior_its_range_and_its_source() -> None:
    cluster, profile = cluster_of("tpu-v5p"), load_profile(GENERIC)
    text = statement(cluster, profile)
    prior = "0.7 (0.5 to 0.85) of the datasheet peak of tpu-v5p (generic-priors.gemm: "
    assert text.startswith(f"peak-only, efficiency prior {prior}")
    assert peak_only_note(cluster, profile) == (text,)
    assert peak_only_note(cluster_of("h800-sxm"), load_profile("h800-trace")) == ()
    assert "of the best product measured on it of mi300x" in statement(cluster_of("mi300x"), profile)


def test_a_profile_without_rates_says_so() -> None:
    empty: CalibrationProfile = load_profile(GENERIC).model_copy(update={"priors": ()})
    assert efficiency_prior(load_accelerator("h20"), empty) is None
    assert statement(cluster_of("h20"), empty).startswith("peak-only: profile generic-roofline has no rate")


def test_missing_figures_and_units() -> None:
    assert missing_figures(load_accelerator("m3-ultra"))[:2] == ("peak.bf16", "scale_up_bandwidth")
    assert missing_figures(load_accelerator("h100-sxm")) == ()
    assert "compute_units" in missing_figures(load_accelerator("mtt-s5000"))
    assert "compute_units" not in missing_figures(load_accelerator("tpu-v5p"))  # an engine moves collectives
    assert units(load_accelerator("ascend-910c")) == "48 cube cores"
    assert units(load_accelerator("mtt-s5000")) == "? MPs"


def test_best_profile_prefers_the_stronger_and_then_the_fuller() -> None:
    assert best_profile(load_accelerator("h800-sxm")) == ("measured", "h800-trace")
    assert best_profile(load_accelerator("gb200")) == ("published", "gb200-layers")
    assert best_profile(load_accelerator("h20")) == ("peak-only", GENERIC)
