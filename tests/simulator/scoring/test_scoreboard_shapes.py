"""The model of a published row: every field has a source, and the columns agree with the configuration."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest

from moesim.hwmodels import InputError
from moesim.simulator.model.catalogue import load_model
from moesim.simulator.scoring import mlperf
from moesim.simulator.scoring.scoreboard import open_rows
from moesim.simulator.scoring.scoreboard.plan import policies_of
from moesim.simulator.scoring.scoreboard.plan import scenario_of as scenario_of_row
from moesim.simulator.scoring.scoreboard.rows import (
    FRAMEWORKS,
    framework_of,
    kept_board,
    publication_of,
    title_of,
)
from moesim.simulator.scoring.scoreboard.score import board_of
from moesim.simulator.scoring.scoreboard.shapes import compared_columns, shape_of

ROWS = {row.id: row for row in open_rows()}


def test_columns_are_checked_against_the_configuration_of_the_model() -> None:
    assert shape_of(ROWS["simumax-007"]).n_layers == 4  # a proxy
    assert shape_of(ROWS["simumax-007"]).moe.dense_layers == (0,)  # type: ignore[union-attr]
    with pytest.raises(InputError, match="hidden of deepseek-v3 is 4096"):
        shape_of(ROWS["simumax-007"].model_copy(update={"hidden": 4096}))
    assert shape_of(ROWS["mbridge-011"]).n_layers == 52  # a table without columns: nothing to check
    shared = shape_of(ROWS["mpf-006"])
    assert shared.moe is not None
    assert (shared.moe.shared_experts, shared.moe.shared_ffn, shared.moe.shared_gate) == (1, 20480, True)


def test_multi_token_prediction_is_what_a_configuration_or_the_notes_say() -> None:
    row = ROWS["automodel-001"].model_copy(update={"source": "elsewhere", "id": "x", "notes": ""})
    noted = {"": 0, "with MTP": 1, "1 MTP layer": 1, "no MTP": 0, "without MTP": 0, "MTP off": 0}
    for notes, layers in noted.items():
        assert shape_of(row.model_copy(update={"notes": notes})).mtp_layers == layers, notes
    assert shape_of(ROWS["mbridge-127"]).mtp_layers == 1  # its configuration


@pytest.mark.parametrize(
    ("model", "heads"), [("nemotron-3-nano-30b-a3b", 32), ("nemotron-3-ultra-550b-a55b", 64)]
)
def test_heads_of_a_row_are_those_of_attention_and_not_of_a_recurrent_mixer(model: str, heads: int) -> None:
    shape = load_model(model)
    columns = {name: own for name, _, own in compared_columns(open_rows()[0], shape)}
    assert columns["heads"] == heads


# -- the kept medians of the open scoreboard, and the names of its rows ----------------------------


@pytest.fixture
def boards() -> ModuleType:
    """The script that keeps the scoreboard's rows."""
    return importlib.import_module("lab.writers.boards")


def test_kept_medians_are_those_of_the_kept_rows(boards: ModuleType) -> None:
    script = importlib.import_module("lab.writers.kept_board")
    board = boards.board(boards.kept())
    assert script.kept_board(board, kept_board().computed) == kept_board()
    assert script.current(board) == script.FILE.read_text("utf-8")
    slower = board.rows[0].model_copy(update={"relative_error": 0.99})
    assert script.current(board_of([slower, *board.rows[1:]])) != script.current(board)


def test_rows_read_back_as_they_were_written(boards: ModuleType) -> None:
    files = boards.kept()
    board = boards.board(files)
    assert boards.rows_text(board.rows) == files[boards.ROWS]
    assert boards.runs_text(boards.scored_runs(files)) == files[boards.RUNS]
    assert {row.id for row in board.rows} == {row.id for row in open_rows()}


def test_the_pages_of_the_scoreboard_are_written_from_the_kept_rows(boards: ModuleType) -> None:
    pages = importlib.import_module("lab.writers.scoreboard_page")
    files = boards.kept()
    for path, text in pages.board_pages(files, boards.board(files)).items():
        assert path.read_text("utf-8") == text, f"{path.name}: run make pages"


def test_a_set_that_there_is_not_is_an_error() -> None:
    with pytest.raises(KeyError):
        kept_board().named("all rows of next year")
    assert 0.0 < kept_board().named("Hopper, complete").median_absolute_error < 1.0


def test_every_row_has_a_framework_a_name_and_a_publication() -> None:
    rows = open_rows()
    assert {framework_of(row) for row in rows} >= {"Megatron-LM", "MaxText", "NeMo", "LLM Foundry"}
    assert {row.id.rpartition("-")[0] for row in rows} == set(FRAMEWORKS)
    for row in rows:
        assert row.model in title_of(row) and row.hardware in title_of(row) and row.id not in title_of(row)
        assert 0 < len(publication_of(row)) <= 64


# -- the mlperf runs have the plans that were submitted, and frozen predictions that nobody rewrites ----


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
