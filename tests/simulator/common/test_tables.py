"""Tables of results: escaped HTML, pandas where it is there, and a clear word where it is not."""

from __future__ import annotations

import sys

import pytest

from moesim.hwmodels.errors import InputError
from moesim.simulator.common.tables import cell, frame, html_table
from moesim.simulator.predict.result import Result


def test_html_is_escaped() -> None:
    text = html_table([{"a<b": "<script>", "n": 1.5}, {"n": None, "late": True}])
    assert "<script>" not in text and "&lt;script&gt;" in text and "a&lt;b" in text
    assert "<th>late</th>" in text and "<td>yes</td>" in text


def test_cells_for_people() -> None:
    assert [cell(v) for v in (None, True, 1234567, 0.123456, 123456.7, "x")] == [
        "", "yes", "1,234,567", "0.1235", "123,457", "x",
    ]  # fmt: skip


def test_without_pandas_the_way_to_get_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(InputError, match=r"pip install 'moesim\[notebook\]'"):
        frame([{"a": 1}])


def test_a_result_shows_itself(trace_pair: tuple[object, object, Result]) -> None:
    result = trace_pair[2]
    table = result.to_pandas()
    assert table.loc[0, "step_time_s"] == result.step.time_s
    assert "step_time_s" in result._repr_html_()
    assert result.to_dict() == result.model_dump(mode="json")


def test_importing_moesim_loads_nothing_heavy() -> None:
    import subprocess

    heavy = "numpy pandas pydantic scipy simpy"
    code = f"import sys, moesim; print([m for m in {heavy!r}.split() if m in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.strip() == "[]"
