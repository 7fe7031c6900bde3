"""What torchtitan's permutations take, by choices of a token: constant and bytes, and the rows of padding.

    python -m lab.profiles.permute_law

Times are those of `lab/benchmarks/widths.py` on H100. For every use and number of choices a line over the
bytes that the model counts is fitted; widths 2,880 and 5,120, 1,024 and 16,384 tokens and top-6 are left out
of the fit and give the errors that are printed.
`operator_curves.py` writes the curves.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from scipy.optimize import nnls

from lab import packed
from moesim.hwmodels.calibration import Conditions, MeasuredCurve
from moesim.kernels.export import Origin, curve, residual
from moesim.simulator.frameworks.eager import INDEX_BYTES, PADDING_ROWS, ROW_BYTES

RESULT, DATE = "2026-11-26-h100-x2-widths.json", "2026-11-26"
USES = {f"eager_{name.removeprefix('experts.')}": size for name, size in ROW_BYTES.items()}
CHOICES = (1, 2, 4, 8)
BY_CHOICES = ("eager_reduce", "eager_expand_gradient")
"""Uses whose products of small matrices depend on the choices; the others have a line for top-2 and for top-8."""
PADDED = "eager_reduce_gradient"
"""The use whose kernel adds up the gradients of the rows of padding."""
ENDS_MB = (1.0, 20000.0)
Row = dict[str, Any]


def rows(use: str, part: str = "permute") -> list[Row]:
    """Measured rows of a use, with the bytes that the model counts."""
    found = [row for run, lines in packed.read(RESULT).items() if run.startswith(part) for row in lines]
    kept = [row for row in found if row.get("part") == part and row.get("use") == f"permute/{use}" and "us" in row]
    return [row | {"bytes": USES[use] * row["tokens"] * row["top_k"] * row["hidden"]} for row in kept]


def left_out(row: Row) -> bool:
    """Whether a row gives errors only."""
    return row["hidden"] in (2880, 5120) or row["tokens"] in (1024, 16384) or row["top_k"] not in CHOICES


def padding_us() -> float:
    """Microseconds that a row of padding adds: the slope between few and many experts, over shapes the mean."""
    measured = rows(PADDED, "pads")
    by_shape: dict[tuple[int, int], dict[int, float]] = {}
    for row in measured:
        by_shape.setdefault((row["hidden"], row["top_k"]), {})[row["experts"]] = row["us"]
    slopes = [(of[max(of)] - of[min(of)]) / (max(of) - min(of)) / PADDING_ROWS for of in by_shape.values()]
    return float(np.mean(slopes))


def padded(row: Row) -> int:
    """Rows of padding of a measured row; those of before 2026-11-27 do not state them."""
    return PADDING_ROWS * min(int(row["experts"]), 64)


def net_us(row: Row, use: str, a_row_us: float) -> float:
    """Time of a row without its padding."""
    return float(row["us"] - (padded(row) * a_row_us if use == PADDED else 0.0))


def lines(use: str) -> tuple[int, ...]:
    """The choices that have a line of their own."""
    return CHOICES if use in BY_CHOICES else (2, 8)


def line(use: str, choices: int, a_row_us: float) -> tuple[float, float]:
    """(us, us a byte) of least relative error over the rows that are not left out."""
    fit = [row for row in rows(use) if row["top_k"] == choices and not left_out(row)]
    net = np.array([net_us(row, use, a_row_us) for row in fit])
    sizes = np.array([row["bytes"] for row in fit])
    found, _ = nnls(np.stack([np.ones_like(sizes), sizes], 1) / net[:, None], np.ones(len(fit)))
    return float(found[0]), float(found[1])


def laws(of: Iterable[tuple[str, int]], name: str, origin: Origin) -> list[MeasuredCurve]:
    """Curves of the lines through two sizes, with the largest miss of rows that were left out."""
    each, out = padding_us(), []
    for use, choices in of:
        constant, slope = line(use, choices, each)
        points = [(mb, mb / (constant + slope * mb * 1e6) * 1e3) for mb in ENDS_MB]
        missed = [row for row in rows(use) if row["top_k"] == choices and left_out(row)]
        miss = max(abs((constant + slope * r["bytes"]) / net_us(r, use, each) - 1) for r in missed)
        conditions = origin.conditions(compute_sms=132)
        made = curve(
            f"{name}.permute.{use}.{choices}", points,
            x=("bytes read and written", "MB"), y=("effective bandwidth", "GB/s"), origin=origin,
            what=f"PyTorch's code of permute/{use} with {choices} choices of a token: {constant:.1f} us and {1e-3 / slope:.0f} GB/s, rows "
            "of 1,024 to 7,168 elements, 512 to 16,384 tokens",
            error=residual(max(0.05, miss), "largest miss of widths and tokens that were left out"),
            used_for=(f"permute/{use}",),
            conditions=conditions.model_copy(update={"rows_a_token": float(choices)}),
        )  # fmt: skip
        out.append(made)
    return out


def padding(name: str, origin: Origin) -> MeasuredCurve:
    """The curve of the rows of padding, over the bytes of their indices."""
    rate = INDEX_BYTES / padding_us() / 1e3
    return curve(
        f"{name}.permute.eager_padding", [(INDEX_BYTES * n / 1e6, rate) for n in (64, 2048)],
        x=("bytes of indices", "MB"), y=("effective bandwidth", "GB/s"), origin=origin,
        what="each of 64 to 512 equal indices adds 1.0 us to the gradient, with rows of 2,048 and 7,168 elements",
        error=residual(0.1, "spread over four shapes; held up to 2,048 rows"),
        used_for=("permute/eager_padding",),
        conditions=Conditions.model_validate(origin.conditions(compute_sms=132).model_dump()),
    )  # fmt: skip


def main() -> None:
    """Print lines, and errors of the rows that were left out."""
    each = padding_us()
    print(f"padding {each:.3f} us a row")
    for use in USES:
        errors = []
        for row in rows(use):
            if not left_out(row):
                continue
            own = lines(use)
            known = [k for k in own if k <= max(row["top_k"], own[0])][-1], [k for k in own if k >= row["top_k"]][0]
            sizes = [row["bytes"] / (c + s * row["bytes"]) for c, s in (line(use, k, each) for k in known)]
            share = np.log(row["top_k"] / known[0]) / np.log(known[1] / known[0]) if known[0] < known[1] else 0
            after = row["bytes"] / (sizes[0] * (1 - share) + sizes[1] * share)
            after += padded(row) * each if use == PADDED else 0.0
            errors.append(abs(after / row["us"] - 1))
        for k in lines(use):
            print(f"{use} top-{k}: {line(use, k, each)[0]:.1f} us, {1e-3 / line(use, k, each)[1]:.0f} GB/s")
        print(f"  {len(errors)} left out, median {np.median(errors):.1%}, worst {max(errors):.0%}")


if __name__ == "__main__":
    main()
