"""Converts results to plain data, pandas frames and HTML tables for notebooks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.frozen import Frozen
from moesim.hwmodels.summary_text import count, table_lines

if TYPE_CHECKING:
    import pandas as pd

Row = dict[str, Any]

MOST_COLUMNS = 8
"""Most columns of the table that a result without a text of its own prints."""


class TableResult(Frozen):
    """A frozen result with a table of rows."""

    def rows(self) -> list[Row]:
        """The result as a table, with one mapping from column to value per row."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain data, as `--json` prints them."""
        return self.model_dump(mode="json")

    def to_pandas(self) -> pd.DataFrame:
        """The rows as a pandas frame; raises InputError where pandas is not installed."""
        return frame(self.rows())

    def __str__(self) -> str:
        """About ten lines with the main figures and their units; here the first rows of the table."""
        rows = self.rows()
        columns = list(dict.fromkeys(key for row in rows for key in row))[:MOST_COLUMNS]
        title = f"{type(self).__name__}: {count(len(rows), 'row')}"
        if not rows:
            return title
        shown = [columns, *([cell(row.get(name)) for name in columns] for row in rows)]
        return "\n".join([title, *table_lines(shown)])

    def __repr__(self) -> str:
        """The text of `str`: a result has thousands of figures, which `to_dict` gives."""
        return str(self)

    def _repr_html_(self) -> str:
        return html_table(self.rows())


def frame(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Rows as a pandas frame; raises InputError where pandas is not installed."""
    try:
        import pandas
    except ImportError:
        raise InputError(
            "to_pandas needs pandas, which is not installed: pip install 'moesim[notebook]'"
        ) from None
    return pandas.DataFrame(list(rows))


def html_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as an HTML table; every text is escaped."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell(row.get(name)))}</td>" for name in columns) + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def cell(value: object) -> str:
    """Format one value of a table, floats with four significant digits and None as an empty text."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"
    return str(value)
