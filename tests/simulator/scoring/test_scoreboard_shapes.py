"""The model of a published row: every field has a source, and the columns agree with the configuration."""

from __future__ import annotations

import pytest

from moesim.hwmodels import InputError
from moesim.simulator.model.catalogue import load_model
from moesim.simulator.scoring.scoreboard import open_rows
from moesim.simulator.scoring.scoreboard.shapes import compared_columns, shape_of

ROWS = {row.id: row for row in open_rows()}


def test_columns_are_checked_against_the_configuration_of_the_model() -> None:
    assert shape_of(ROWS["simumax-007"]).n_layers == 4  # a difference that families.yaml explains
    assert shape_of(ROWS["simumax-007"]).moe.dense_layers == (0,)  # type: ignore[union-attr]
    with pytest.raises(InputError, match="layers of deepseek-v3 is 4"):
        shape_of(ROWS["simumax-007"].model_copy(update={"source": "elsewhere"}))
    assert shape_of(ROWS["mbridge-011"]).n_layers == 52  # a table without columns: nothing to check
    shared = shape_of(ROWS["mpf-006"])
    assert shared.moe is not None
    assert (shared.moe.shared_experts, shared.moe.shared_ffn, shared.moe.shared_gate) == (1, 20480, True)


def test_a_field_that_is_not_stated_is_refused() -> None:
    row = ROWS["automodel-001"].model_copy(update={"source": "elsewhere", "id": "x"})
    with pytest.raises(InputError, match=r"x: deepseek-v3 has multi-token-prediction modules"):
        shape_of(row)
    short = ROWS["simumax-007"].model_copy(
        update={"id": "x", "notes": "", "group": "", "source": "MooreThreads/SimuMax x", "vocab": 0}
    )
    with pytest.raises(InputError, match=r"does not say whether they were trained"):
        shape_of(short)


@pytest.mark.parametrize(
    ("model", "heads"), [("nemotron-3-nano-30b-a3b", 32), ("nemotron-3-ultra-550b-a55b", 64)]
)
def test_heads_of_a_row_are_those_of_attention_and_not_of_a_recurrent_mixer(model: str, heads: int) -> None:
    shape = load_model(model)
    columns = {name: own for name, _, own in compared_columns(open_rows()[0], shape)}
    assert columns["heads"] == heads
