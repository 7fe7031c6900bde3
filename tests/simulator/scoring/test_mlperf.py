"""The MLPerf runs have the plans that were submitted, and frozen predictions that nobody rewrites."""

from __future__ import annotations

import pytest

from moesim.hwmodels import InputError
from moesim.simulator.scoring import mlperf
from moesim.simulator.scoring.scoreboard.plan import policies_of
from moesim.simulator.scoring.scoreboard.plan import scenario_of as scenario_of_row
from moesim.simulator.scoring.scoreboard.rows import open_rows

MICROBATCHES = {
    "gb300-256": 240, "gb300-512": 120, "gb300-2048": 32, "gb300-4096": 16, "gb300-8192": 8,
    "gb200-512": 240, "gb200-2048": 60, "gb200-4096": 32, "gb200-8192": 16,
}  # fmt: skip
"""MINIBS of the submitted configurations: sequences of a data-parallel rank, of one each."""


def test_nine_runs_have_the_submitted_micro_batches_and_racks_of_64() -> None:
    assert [run.name for run in mlperf.runs()] == list(MICROBATCHES)
    for run in mlperf.runs():
        scenario = mlperf.scenario_of(run.name)
        machine, plan = scenario.machine, scenario.parallel
        assert (machine.n_gpus, machine.node.n_gpus) == (run.gpus, 64)
        replicas = run.gpus // (plan.pp * plan.tp)
        assert scenario.batch.sequences == MICROBATCHES[run.name] * replicas
        assert sum(scenario.stages.layers or ()) == scenario.shape.n_layers == 61
        gb200 = run.name.startswith("gb200")
        assert (plan.tp, scenario.recompute, scenario.recipe.head) == (
            (2, ("mlp",), "bf16") if gb200 else (1, "none", "fp8")
        )
        assert machine.node.scale_out_bytes_per_s == pytest.approx(50e9 if gb200 else 100e9)


def test_only_two_runs_have_a_published_step() -> None:
    rows = {row.id: row for row in open_rows() if row.group == mlperf.GROUP}
    assert [run.row for run in mlperf.runs() if run.row] == sorted(rows)
    for row in rows.values():
        run = mlperf.run_named(row.id)
        assert (run.gpus, run.sequences) == (row.n_gpus, row.gbs_seqs)
        (policy,) = policies_of(row)
        scenario = scenario_of_row(row, policy)
        assert scenario == mlperf.scenario_of(run.name) and scenario.recompute == policy
        assert (row.tp, row.pp, row.vpp, row.ep) == (
            scenario.parallel.tp, scenario.parallel.pp, scenario.parallel.vpp, scenario.parallel.ep,
        )  # fmt: skip


def test_overrides_take_mechanisms_away_and_unknown_runs_are_refused() -> None:
    plain = mlperf.scenario_of("gb300-512", ["software.static_experts=null", "communication.gemm_margin=0"])
    assert plain.software.static_experts is None and plain.communication.gemm_margin == 0
    with pytest.raises(InputError, match=r"gb300-51.*gb300-512"):
        mlperf.scenario_of("gb300-51")
