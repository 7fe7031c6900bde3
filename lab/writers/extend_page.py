"""The table of registered topologies in docs/extend.md, from the registry itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from moesim.hwmodels.topologies.description import ScaleOutFabric
from moesim.hwmodels.topologies.part import kind_rows
from moesim.hwmodels.topologies.registry import SCALE_OUT, SCALE_UP

END = "<!-- end of registry -->"


def filled(page: str) -> str:
    """A page with every table between its marks (`<!-- registry NAME -->`) written anew."""
    for name, lines in tables().items():
        begin = f"<!-- registry {name} -->\n"
        if begin not in page:
            raise SystemExit(f"the page has no mark {begin.strip()!r}")
        before, rest = page.split(begin)
        page = before + begin + "\n".join(lines) + "\n" + rest[rest.index(END) :]
    return page


def tables() -> dict[str, list[str]]:
    """Lines of every table by its name."""
    return {
        "topologies": [*_topologies(), "", _shared_keys()],
    }


def _topologies() -> list[str]:
    rows = [
        (place, f"`{row['kind']}`", _names(row["keys"].split(", ") if row["keys"] else ()), row["example"])
        for place, specs in (("scale-up", SCALE_UP), ("network", SCALE_OUT))
        for row in kind_rows(specs)
    ]
    return _table(("file", "`kind`", "keys of `fabric`", "example"), rows)


def _shared_keys() -> str:
    return f"Every network with a fabric also states {_names(ScaleOutFabric.model_fields)}."


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return [*lines, *(f"| {' | '.join(row)} |" for row in rows)]
