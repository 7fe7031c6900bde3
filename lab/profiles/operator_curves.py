"""Writes the shipped curves of PyTorch's operators on H100 and H200 from the rows of `moesim calibrate --model`.

    python -m lab.profiles.operator_curves hwmodels/data/calibration

`h100-eager`: all operators that memory or small kernels limit, at the sizes of three models, measured on one H100. `h200-heads`: norms
over heads measured on an H200, and two uses of H100's that were not measured there. Kernels that reach less than 0.6 of an H100's
bandwidth take the same time on an H200 within 16 % (both machines measured 20 such operators), so those two keep their times.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from lab import packed

from moesim.hwmodels.accelerator import load_accelerator
from moesim.hwmodels.calibration import CalibrationProfile, MeasuredCurve, load_profile
from moesim.kernels.calibrate.entries import Rows, as_profile
from moesim.kernels.calibrate.operators import LAUNCHES_FROM, NAME, _gaps_s, curves
from moesim.kernels.calibrate.protocol import TimedRow
from moesim.kernels.export import Origin, residual, write_profile
from moesim.simulator.cost.measured_rates import TransferCurve

H100 = tuple(f"2026-11-26-h100-operators-{name}.rows.jsonl" for name in ("q30", "l8b", "ds16"))
H200 = ("2026-11-26-h200-x2-operators-q30.rows.jsonl",)
DATE, HEADS = "2026-11-26", 128
CARRIED = ("rope/eager_halves", "rope/eager_halves_backward", "copy/eager_cat")
"""Uses that reach 0.25 to 0.7 of the H100's bandwidth and were not measured on an H200."""


def rows_of(files: Sequence[str]) -> list[TimedRow]:
    """Rows of the operators in some calibrations."""
    lines = (line for file in files for line in packed.text(f"lab/results/{file}.xz").splitlines())
    found = (json.loads(line) for line in lines)
    return [TimedRow.from_json(row, "lab/results") for row in found if row.get("measurement") == NAME]


def narrow(rows: Iterable[TimedRow]) -> list[TimedRow]:
    """Norms over heads, by the names of their own curves; they were measured under that of every norm."""
    out = []
    for row in rows:
        if row.parameters.get("width") == HEADS and str(row.parameters["use"]).startswith("norm/"):
            use = str(row.parameters["use"]).replace("eager_", "eager_head_")
            out.append(
                TimedRow.from_json(
                    json.loads(row.to_json()) | {"parameters": {**row.parameters, "use": use}}, "lab"
                )
            )
    return out


def fitted(rows: list[TimedRow], name: str, accelerator: str, device: str) -> list[MeasuredCurve]:
    """Curves over bytes whose residual is the largest miss of any row, which models at like bytes differ by."""
    command = (
        "moesim calibrate --quick --model lab/scoring/data/h100x2/{"
        + ("q30,l8b,ds16" if "h100" in name else "q30")
        + "}.yaml"
    )
    origin = Origin(
        f"moesim calibrate on {device}", DATE, device=device, driver="580.159.04", cuda="13.0", command=command,
        clocks="not pinned, at most 1980 MHz",
    )  # fmt: skip
    found = []
    for curve in curves(Rows(rows, load_accelerator(accelerator), origin, name)):
        miss = max(_miss(curve, row) for row in rows if row.parameters["use"] == curve.used_for[0])
        meaning = "largest miss of any row, at least 5 %: models differ at like bytes"
        found.append(curve.model_copy(update={"residual": residual(max(0.05, miss), meaning)}))
    return found


def _miss(curve: MeasuredCurve, row: TimedRow) -> float:
    """Relative miss of the curve's time at the row's bytes (eq. C6), without gaps between launches."""
    gap = load_profile(LAUNCHES_FROM).launch_gap
    seconds = row.seconds - _gaps_s(row, gap.value if gap else 0.0)
    return abs(TransferCurve(curve).read(float(row.parameters["bytes"])).seconds / seconds - 1.0)


def carried(curve: MeasuredCurve) -> MeasuredCurve:
    """A curve of the H100 as one of the H200, with 16 % added to its error."""
    return curve.model_copy(
        update={
            "id": curve.id.replace("h100-eager", "h200-heads"),
            "kind": "derived",
            "residual": residual(
                min(0.5, curve.residual.relative + 0.16), "as on H100, and 16 % for the transfer"
            ),
            "note": "times of an H100: kernels that reach less than 0.6 of its bandwidth are as fast on H200",
        }
    )


def main() -> None:
    """Write both profiles into a folder."""
    folder = Path(sys.argv[1])
    own = fitted(rows_of(H100), "h100-eager", "h100-sxm", "NVIDIA H100 80GB HBM3")
    more = [carried(curve) for curve in own if curve.used_for[0] in CARRIED]
    heads = fitted(narrow(rows_of(H200)), "h200-heads", "h200-sxm", "NVIDIA H200")
    software = "torch 2.11.0, CUDA 13.0, driver 580.159.04"
    evidence = "Single pieces of PyTorch code with a cold L2, at the sizes of the models' own steps. No step was looked at."
    write_profile(
        as_profile(
            CalibrationProfile(
                name="h100-eager", accelerator="any", software=software, evidence=evidence,
                description="PyTorch's operators between GEMMs and at the end of a step, measured on one H100 (part of others).",
            ),
            own,
        ),
        folder / "h100-eager.yaml",
    )  # fmt: skip
    write_profile(
        as_profile(
            CalibrationProfile(
                name="h200-heads", accelerator="any", software=software, evidence=evidence,
                description="Norms, rotary embedding and joins over heads as torchtitan writes them, on H200 (part of others).",
            ),
            [*heads, *more],
        ),
        folder / "h200-heads.yaml",
    )  # fmt: skip


if __name__ == "__main__":
    main()
