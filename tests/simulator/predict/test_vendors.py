"""Every shipped cluster predicts one and the same job, or says which figure nobody published."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import moesim
from moesim.hwmodels import InputError, list_accelerators, list_clusters, load_cluster
from moesim.hwmodels.calibration import load_profile
from moesim.hwmodels.confidence import best_profile, confidence_statement
from moesim.simulator.predict.result import Result
from moesim.simulator.scenario.defaults import kernels_of

HOME = "deepseek-v3-2048xh800"
MIXTRAL = (
    "model=mixtral-8x22b", "precision=bf16", "schedule=1f1b", "parallel.pp=1", "batch.sequences=256",
    "recompute=selective", "run.tokens=1.0e12",
)  # fmt: skip
MISSING = {
    "m2-ultra": "peak.bf16", "m3-ultra": "peak.bf16", "m4-max": "peak.bf16",
    "mtt-s4000": "compute_units", "mtt-s5000": "compute_units", "rubin": "compute_units",
    "mi455x": "compute_units", "rtx-pro-6000": "scale_up_bandwidth",
}  # fmt: skip


def predict(cluster: str, *more: str) -> Result:
    """Mixtral on one node (or slice) of a cluster."""
    described = load_cluster(cluster)
    chip, gpus = described.accelerator, described.node.n_gpus
    _, profile = best_profile(chip, "bf16")
    return moesim.simulate(
        HOME, *MIXTRAL, f"cluster={cluster}", f"profile={profile}",
        f"cluster.nodes={1 if described.nodes == 1 else 2}",
        f"parallel.ep={8 if gpus % 8 == 0 or described.nodes > 1 else 1}",
        f"communication.sms={0 if chip.communication_engine else 20}",
        f"communication.kernels={kernels_of([described])[0]}",
        f"batch.sequences={max(256, 2 * gpus)}", *more,
    )  # fmt: skip


def test_every_accelerator_is_in_a_cluster() -> None:
    assert {load_cluster(name).accelerator.name for name in list_clusters()} == set(list_accelerators())


@pytest.mark.parametrize("name", list_clusters())
def test_a_small_moe_is_predicted_or_the_missing_figure_named(name: str) -> None:
    cluster = load_cluster(name)
    chip = cluster.accelerator
    if chip.name in MISSING:
        with pytest.raises(
            InputError, match=rf"accelerator '{chip.name}' has no (figure )?{MISSING[chip.name]}"
        ):
            predict(name)
        return
    result = predict(name)
    step = result.step
    assert 0 < step.lower_bound_s <= step.time_s <= step.upper_bound_s
    assert 0.02 < step.mfu_causal < 0.8
    level, profile = best_profile(chip, "bf16")
    assert result.confidence == level
    assert result.confidence_reason == confidence_statement(cluster, load_profile(profile))
    if level == "peak-only":
        assert result.confidence_reason in result.extrapolated
        assert "efficiency prior" in result.confidence_reason
    engine_notes = [note for note in result.extrapolated if "a dedicated engine" in note]
    assert len(engine_notes) == (1 if chip.communication_engine else 0) * (cluster.n_gpus > 1)


def test_missing_units_stop_only_what_needs_them(tmp_path: Path) -> None:
    """Without expert parallelism a Moore Threads server computes, and nothing asks for its units."""
    result = predict("mtt-s5000-server", "parallel.ep=1", "communication.sms=0")
    assert result.confidence == "peak-only" and result.step.time_s > 0
    own = load_profile("generic-roofline").model_dump(mode="json", exclude_none=True)
    rate = next(c for c in own["curves"] if c["id"] == "ep.nic_fraction.deepep-2025-02")
    own |= {
        "include": [],
        "dispatchers": ["mine"],
        "curves": [*own["curves"], rate | {"id": "ep.nic_fraction.mine"}],
    }
    (tmp_path / "own.json").write_text(json.dumps(own))
    kernels = (f"profile={tmp_path / 'own.json'}", "communication.kernels=mine")
    with pytest.raises(InputError, match=r"communication\.sms=0: expert-parallel kernels need at least 1"):
        predict("mtt-s5000-server", "communication.sms=0", *kernels)


def test_an_engine_refuses_compute_units_by_its_name() -> None:
    with pytest.raises(
        InputError, match=r"communication\.sms=20: on tpu-v5e a dedicated engine \(ICI remote DMA\)"
    ):
        predict("tpu-v5e-256-pod", "communication.sms=20")


def test_the_wiring_of_a_node_matters() -> None:
    """The same chip on one non-blocking switch: TP2 no longer has one link of seven."""
    dense = ("model=llama-3-8b", "parallel.tp=2", "parallel.ep=1", "parallel.sequence_parallel=true")
    mesh = predict("mi300x-2048", *dense)
    switch = predict("mi300x-2048", *dense, "cluster.node.scale_up=null")
    assert mesh.breakdown_s.exposed_communication > 4.0 * switch.breakdown_s.exposed_communication
    torus = predict("tpu-v5p-2048-slice", "parallel.ep=8")
    crossbar = predict("tpu-v5p-2048-slice", "parallel.ep=8", "cluster.node.scale_up=null")
    assert torus.step.time_s > crossbar.step.time_s


def test_provenance_holds_the_shares_of_an_engine() -> None:
    result = predict("trn2-2048")
    entries = {entry.path: entry.kind for entry in result.provenance}
    assert entries["profile.engine.ep.scale_up_fraction"] == "assumed"
    assert entries["cluster.node.accelerator.compute_units"] == "spec"
