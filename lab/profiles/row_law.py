"""The law of rows and bytes in DeepEP's dispatch and combine, from what `row_costs.py` measured.

    python -m lab.profiles.row_law table deepep-2.jsonl deepep-4.jsonl deepep-8.jsonl ours.jsonl --out rows.json
    python -m lab.profiles.row_law law lab/results/2026-11-25-h100-x2-row-costs.json.xz

`table` puts runs into one file: the machine of each run, then one row a line. `law` fits the SM time of a
dispatch or combine beyond its call, for n SMs, T tokens of a rank, rows of B bytes that they send and R
ranks on the node:

    dispatch:  n (t - 30 us) = T (s + h R) + rows (c + m / R + b B)
    combine:   n (t - 34 us) = T (h R + (d + g R) B) + rows (c + b B)

The 30 and 34 us are what two ranks take for 512 to 8,192 tokens, extended to none, notify included. Widths
3,072 and 6,144 are left out of the fit. So are points where a link carries more than 200 GB/s, rows of
combine that are no multiple of 512 bytes, and combines of tokens that go nowhere, which no top-k routing
has. It prints the curves of `deepep-kernels` and the errors.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from lab import packed

COLUMNS = (
    "run",
    "kernels",
    "operation",
    "ranks",
    "sms",
    "tokens",
    "hidden",
    "row_bytes",
    "routing",
    "rows",
    "us",
    "least_us",
)
LEFT_OUT = (3072, 6144)
MOST_ON_A_LINK = 200e9
GPUS = 2

Row = dict[str, Any]


def table(paths: Sequence[Path], out: Path) -> None:
    """Write the runs and their rows into one file."""
    runs, rows = [], []
    for path in paths:
        first, *rest = map(json.loads, path.read_text().splitlines())
        runs.append(
            {
                **first,
                "command": Path(first["command"]).name if "/" not in first["command"] else first["command"],
            }
        )
        for row in rest:
            if "end" in row:
                runs[-1]["nvidia_smi_after"] = row["end"]
            else:
                row["rows"] = round(row["rows"], 1)
                rows.append([len(runs) - 1, *(row[name] for name in COLUMNS[1:])])
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
    head = json.dumps({"runs": runs, "columns": COLUMNS}, indent=1)[:-2]
    out.write_text(f'{head},\n "rows": [\n{lines}\n]}}\n')


def rows_of(path: Path) -> list[Row]:
    """Rows of a table that DeepEP ran in cached mode."""
    data = json.loads(packed.text(path))
    rows = [dict(zip(data["columns"], row, strict=True)) for row in data["rows"]]
    return [row for row in rows if row["kernels"] == "deepep" and row["tokens"] == 4096]


def on_a_link(row: Row) -> float:
    """Bytes/s that leave one GPU, whose ranks send half of their rows to the other."""
    return float(row["ranks"] / GPUS * row["rows"] / 2 * row["row_bytes"] / (row["us"] * 1e-6))


def dispatch_us(x: Sequence[float], row: Row) -> float:
    """Time of a dispatch by the law."""
    s, h, m, c, b = x
    ranks, rows = row["ranks"], row["rows"] / row["tokens"]
    each = s + h * ranks + rows * (c + m / ranks + b * row["row_bytes"])
    return float(30.0 + row["tokens"] / row["sms"] * each / 1e3)


def combine_us(x: Sequence[float], row: Row) -> float:
    """Time of a combine by the law."""
    h, d, g, c, b = x
    ranks, rows = row["ranks"], row["rows"] / row["tokens"]
    each = h * ranks + (d + g * ranks) * row["row_bytes"] + rows * (c + b * row["row_bytes"])
    return float(34.0 + row["tokens"] / row["sms"] * each / 1e3)


def usable(row: Row) -> bool:
    """Whether the SMs, and only they, decide the row."""
    few = row["sms"] == 8 or (row["sms"] == 4 and row["ranks"] > GPUS)
    ragged = row["operation"].startswith("combine") and row["row_bytes"] % 512
    nowhere = row["operation"].startswith("combine") and row["routing"].startswith("share")
    return few and not ragged and not nowhere and on_a_link(row) < MOST_ON_A_LINK


def fit(
    rows: Sequence[Row], time: Callable[[Sequence[float], Row], float], start: Sequence[float]
) -> np.ndarray[Any, Any]:
    """Parameters of least relative error, outliers weighed down, of the rows that are not left out."""
    kept = [row for row in rows if row["hidden"] not in LEFT_OUT]
    found = least_squares(
        lambda x: [np.log(time(x, row) / row["us"]) for row in kept], start, loss="soft_l1", f_scale=0.05
    )
    return np.asarray(found.x)


def law(path: Path) -> None:
    """Print parameters, curves and errors."""
    every = [row for row in rows_of(path) if usable(row)]
    for operation, time, start in (
        ("dispatch", dispatch_us, (400.0, 15.0, 340.0, 40.0, 0.025)),
        ("combine", combine_us, (14.0, 0.08, 0.006, 80.0, 0.018)),
    ):
        rows = [row for row in every if row["operation"].startswith(operation)]
        x = fit(rows, time, start)
        print(operation, " ".join(f"{value:.4g}" for value in x))
        for ranks in (2, 4, 8):
            if operation == "dispatch":
                s, h, m, c, b = x
                token, row_ns = f"token {s + h * ranks:.0f} ns", c + m / ranks
            else:
                h, d, g, c, b = x
                token, row_ns = f"token {h * ranks:.1f} ns, {1 / (d + g * ranks):.2f} GB/s", c
            print(f"  {ranks} ranks: {token}; row {row_ns:.1f} ns, {1 / b:.1f} GB/s")
        for name, part in (("fitted", False), ("left out", True)):
            errors = [
                abs(time(x, row) / row["us"] - 1) for row in rows if (row["hidden"] in LEFT_OUT) == part
            ]
            middle, most = np.median(errors), np.quantile(errors, 0.9)
            print(f"  {name}: {len(errors)} points, median {middle:.1%}, 90 % within {most:.1%}")


def main() -> None:
    """Run the part named on the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=("table", "law"))
    parser.add_argument("paths", type=Path, nargs="+")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.part == "table":
        table(options.paths, options.out)
    else:
        law(options.paths[0])


if __name__ == "__main__":
    main()
