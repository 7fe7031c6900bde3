"""Every field of a scored row's model has a source."""

from __future__ import annotations

from lab.scoring.shape_sources import field_sources
from moesim.hwmodels import InputError
from moesim.simulator.scoring.scoreboard import open_rows
from moesim.simulator.scoring.scoreboard.plan import policies_of, scenario_of
from moesim.simulator.scoring.scoreboard.shapes import shape_of

ROWS = {row.id: row for row in open_rows()}


def test_no_row_is_scored_with_a_guessed_shape() -> None:
    for row in ROWS.values():
        try:
            scenario_of(row, policies_of(row)[-1])
        except InputError:
            continue
        shape = shape_of(row)
        parts = [shape, *shape.attention_by_name.values(), *([shape.moe] if shape.moe else [])]
        fields = {name for part in parts for name in type(part).model_fields}
        sources = field_sources(row)
        unsourced = sorted(name for name in fields if not sources.get(name))
        assert not unsourced, f"{row.id}: no source for {', '.join(unsourced)}"
