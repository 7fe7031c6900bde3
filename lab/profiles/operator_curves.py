"""Writes the shipped curves of PyTorch's operators on H100 and H200 from the rows of `moesim calibrate --model`.

    python -m lab.profiles.operator_curves hwmodels/data/calibration

`eager-permutes`: permutations by choices of a token and rows of padding, measured on H100 (`permute_law.py`).
`h100-eager` and `h200-eager`: all operators that memory or small kernels limit, at the sizes of three models on one H100, and at those of the
eight H200 runs on one H200. `h100-eager` also says what GEMMs lose beside NCCL on four H100. `h100-gemm`: GEMMs on
one H100, at the sizes of its models and at those of every calibration, means of the sessions.
"""

from __future__ import annotations

import json
import sys
from msgspec.structs import replace
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from lab import packed
from lab.profiles import permute_law

from moesim.hwmodels.accelerator import load_accelerator
from moesim.hwmodels.calibration import CalibrationProfile, MeasuredCurve, load_profile
from moesim.hwmodels.provenance import SourcedFraction
from moesim.kernels.calibrate.entries import Rows, as_profile
from moesim.kernels.calibrate.operators import LAUNCHES_FROM, NAME, _gaps_s, curves, tables
from moesim.kernels.calibrate.protocol import TimedRow
from moesim.kernels.export import Origin, gemm_table, residual, significant, write_profile
from moesim.simulator.cost.measured_rates import TransferCurve
from moesim.simulator.frameworks.eager import GROUPED_MM

H100 = tuple(f"2026-11-26-h100-operators-{name}.rows.jsonl" for name in ("q30", "l8b", "ds16"))
AGAIN = ("2026-11-26-h100-run-operators.rows.jsonl", "2026-11-26-h100-rope-halves.rows.jsonl")
"""Measured later: packing while the GPU waited for the host's table of blocks before, joins of MLA at the shapes of keys alone, and rotations by
halves as slices, not as chunks, whose backward joins them."""
H200 = ("2026-11-26-h200-run-operators.rows.jsonl",)
GEMMS = (
    (
        "h100-gemm", (*H100, "2026-11-26-h100-gemm.rows.jsonl"), "h100-sxm", "NVIDIA H100 80GB HBM3",
        "moesim calibrate --quick --model lab/scoring/data/h100x2/{q30,l8b,ds16}.yaml; moesim calibrate --only gemm",
        "not pinned, 1215 to 1980 MHz, median 1425 MHz",
    ),
)  # fmt: skip
"""Profile, rows, accelerator, device, commands and clocks of the GEMMs of one GPU."""
BESIDE = "2026-11-26-h100-x4-beside-nccl.json"
DATE = "2026-11-26"


PERMUTED = tuple(f"permute/{use}" for use in permute_law.BY_CHOICES)
PERMUTES = tuple(f"permute/{use}" for use in permute_law.USES)


def rows_of(files: Sequence[str], measurements: Sequence[str] = (NAME,)) -> list[TimedRow]:
    """Rows of the operators, or of other measurements, in some calibrations."""
    lines = (line for file in files for line in packed.text(f"lab/results/{file}.xz").splitlines())
    found = (json.loads(line) for line in lines)
    return [TimedRow.from_json(row, "lab/results") for row in found if row.get("measurement") in measurements]


def without_padding(rows: list[TimedRow]) -> list[TimedRow]:
    """Rows without the time of the rows of padding, which is an operator of its own."""
    each, out = permute_law.padding_us() * 1e-6, []
    for row in rows:
        p = row.parameters
        padded = permute_law.padded(p) * each if p["use"] == f"permute/{permute_law.PADDED}" else 0.0
        out.append(replace(row, seconds=row.seconds - padded) if padded else row)
    return out


def latest(before: list[TimedRow], after: list[TimedRow]) -> list[TimedRow]:
    """Rows of every use from the later measurement, where it has the use."""
    again = {row.parameters["use"] for row in after}
    return [*(row for row in before if row.parameters["use"] not in again), *after]


def lost_beside() -> SourcedFraction:
    """Median over GEMMs of what a second of NCCL alone costs them (eq. O5), with the range over GEMMs and attention."""
    found = packed.read(BESIDE)["rows"]
    lost = {(row["collective"], row["operator"]): row["lost"] * row["collective_ratio"] for row in found}
    timed = [value for (_, of), value in lost.items() if "product" in of or "attention" in of]
    return SourcedFraction(
        value=round(median(value for (_, of), value in lost.items() if "product" in of), 3),
        kind="measured",
        source=f"lab/results/{BESIDE}.xz: median of 14 products (BF16, FP8) beside an all-gather or reduce-scatter, "
        "4x H100, driver 580.159.04, torch 2.11.0, NCCL 2.28.9, 24 channels",
        date=DATE,
        between=(round(min(timed), 3), round(max(timed), 3)),
        note="eq. O5; two of the GPUs gave 0.253",
    )


def fitted(rows: list[TimedRow], name: str, accelerator: str, device: str) -> list[MeasuredCurve]:
    """Curves over bytes whose residual is the largest miss of any row, which models at like bytes differ by."""
    command = (
        "moesim calibrate --quick --model lab/scoring/data/h100x2/{q30,l8b,ds16}.yaml"
        if "h100" in name
        else "python -m lab.studies.run_operators --out OUT --only operators"
    )
    origin = Origin(
        f"moesim calibrate on {device}", DATE, device=device, driver="580.159.04", cuda="13.0", command=command,
        clocks="not pinned, at most 1980 MHz",
    )  # fmt: skip
    found: list[MeasuredCurve] = []
    by_choices = [row for row in rows if row.parameters["use"] in PERMUTED]
    for k in sorted({int(row.parameters["top_k"]) for row in by_choices}):
        of = [row for row in by_choices if row.parameters["top_k"] == k]
        found += [chosen(one, k) for one in _fitted(of, name, accelerator, origin)]
    return found + _fitted([row for row in rows if row.parameters["use"] not in PERMUTED], name, accelerator, origin)


def chosen(measured: MeasuredCurve, choices: int) -> MeasuredCurve:
    """A curve for tokens of so many choices."""
    conditions = measured.conditions.model_copy(update={"rows_a_token": float(choices)})
    return measured.model_copy(update={"id": f"{measured.id}.{choices}", "conditions": conditions})


def _fitted(rows: list[TimedRow], name: str, accelerator: str, origin: Origin) -> list[MeasuredCurve]:
    found = []
    for measured in curves(Rows(rows, load_accelerator(accelerator), origin, name)):
        curve = measured.model_copy(update={"points": rising(measured.points)})
        miss = max(_miss(curve, row) for row in rows if row.parameters["use"] == curve.used_for[0])
        meaning = "largest miss of any row, at least 5 %: models differ at like bytes"
        found.append(curve.model_copy(update={"residual": residual(max(0.05, miss), meaning)}))
    return found


def gemms(name: str, files: Sequence[str], accelerator: str, origin: Origin) -> CalibrationProfile:
    """GEMMs by class and format; equal shapes of several sessions have the mean of their times."""
    rows = [
        row
        for row in rows_of(files, (NAME, "gemm"))
        if row.measurement == "gemm" or "groups" in row.parameters
    ]
    chip, found = load_accelerator(accelerator), []
    for variant in ("", GROUPED_MM):  # grouped ones are PyTorch's own kernel, which other trainers do not run
        own = [
            row
            for row in rows
            if row.measurement == "gemm" or (row.parameters["groups"] == 1) != bool(variant)
        ]
        for table in tables(Rows(own, chip, origin, name)):
            if not variant:
                found.append(table)
            elif table.cls != "gemm":
                found.append(table.model_copy(update={"variant": variant, "id": f"{table.id}.{variant}"}))
    for cls, groups in (("gemm", 1), ("grouped_gemm", 8)):
        times: dict[tuple[float, ...], list[float]] = {}
        for row in Rows(rows, chip, origin, name).of("gemm", kind="product", dtype="fp8", groups=groups):
            shape = tuple(float(row.parameters[side]) for side in ("m", "n", "k", "groups"))
            times.setdefault(shape, []).append(row.seconds)
        if not times:
            continue
        points = [(m, n, k, g, 2 * m * n * k / fmean(of)) for (m, n, k, g), of in times.items()]
        found.append(gemm_table(
            f"{name}.{cls}_fp8", cls, "fp8", points, sm_aware=True, origin=origin,  # type: ignore[arg-type]
            what="PyTorch fp8 products, row-wise scales, random inputs beyond L2, graph replay",
            error=residual(0.05, "spread of the sessions, at most"),
            conditions=origin.conditions(compute_sms=132, duty="sustained"),
        ))  # fmt: skip
    return as_profile(
        CalibrationProfile(
            name=name, accelerator="any", software="torch 2.11.0, CUDA 13.0, driver 580.159.04",
            description=f"GEMMs of PyTorch at the limit of power, measured on one {origin.device} (part of others).",
            evidence="Single GEMMs back to back, at the sizes of models' own steps and of DeepSeek-V3. No step was looked at.",
        ),
        found,
    )  # fmt: skip


def rising(points: Sequence[tuple[Any, ...]]) -> tuple[tuple[float, float], ...]:
    """(bytes, rate) with the mean time of neighbours where more bytes took less time: tensors of other shapes stand between them."""
    blocks: list[list[float]] = []  # seconds and points
    for x, rate, *_ in points:
        blocks.append([x / rate, 1])
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (before, m), (last, n) = blocks[-2:]
            blocks[-2:] = [[(before * m + last * n) / (m + n), m + n]]
    seconds = [time for time, count in blocks for _ in range(int(count))]
    return tuple((x, significant(x / time, 5)) for (x, *_), time in zip(points, seconds, strict=True))


def _miss(curve: MeasuredCurve, row: TimedRow) -> float:
    """Relative miss of the curve's time at the row's bytes (eq. C6), without gaps between launches."""
    gap = load_profile(LAUNCHES_FROM).launch_gap
    seconds = row.seconds - _gaps_s(row, gap.value if gap else 0.0)
    return abs(TransferCurve(curve).read(float(row.parameters["bytes"])).seconds / seconds - 1.0)


def main() -> None:
    """Write the three profiles into a folder."""
    folder = Path(sys.argv[1])
    for name, files, accelerator, device, command, clocks in GEMMS:
        origin = Origin(
            f"moesim calibrate on {device}", DATE, device=device, driver="580.159.04", cuda="13.0", command=command, clocks=clocks,
        )  # fmt: skip
        write_profile(gemms(name, files, accelerator, origin), folder / f"{name}.yaml")
    measured = [row for row in latest(rows_of(H100), rows_of(AGAIN)) if row.parameters["use"] not in PERMUTES]
    widths = Origin(
        "moesim measurement on 2x NVIDIA H100 80GB HBM3", DATE, device="NVIDIA H100 80GB HBM3", driver="580.159.04", cuda="13.0",
        command="python -m lab.benchmarks.widths --out OUT --seconds 75 --parts permute,rows", clocks="not pinned, at most 1980 MHz",
    )  # fmt: skip
    first = [(use, 8) for use in permute_law.BY_CHOICES]
    first += [(use, k) for use in permute_law.USES if use not in permute_law.BY_CHOICES for k in permute_law.lines(use)]
    own = permute_law.laws(first, "h100-eager", widths)
    own += fitted(measured, "h100-eager", "h100-sxm", "NVIDIA H100 80GB HBM3")
    heads = fitted(without_padding(rows_of(H200)), "h200-eager", "h200-sxm", "NVIDIA H200")
    fewer = permute_law.laws([(use, k) for use in permute_law.BY_CHOICES for k in permute_law.CHOICES[:-1]], "eager", widths)
    write_profile(
        as_profile(
            CalibrationProfile(
                name="eager-permutes", accelerator="any", software="torch 2.11.0, CUDA 13.0, driver 580.159.04",
                description="torchtitan's permutations of few choices and the gradients of padding (part of others).",
                evidence="Lines over bytes, fitted to widths 1,024 to 7,168 and 512 to 16,384 tokens on H100, cold L2; "
                "assumed on H200, where the same products of small matrices bound them.",
            ),
            [*fewer, permute_law.padding("eager", widths)],
        ),
        folder / "eager-permutes.yaml",
    )  # fmt: skip
    software = "torch 2.11.0, CUDA 13.0, driver 580.159.04"
    evidence = "Single pieces of PyTorch code with a cold L2, at the sizes of the models' own steps. No step was looked at."
    write_profile(
        as_profile(
            CalibrationProfile(
                name="h100-eager", accelerator="any", software=software, evidence=evidence,
                description="PyTorch's operators between GEMMs and at the end of a step, measured on one H100 (part of others).",
                lost_beside_nccl=lost_beside(), include=("eager-permutes",),
            ),
            own,
        ),
        folder / "h100-eager.yaml",
    )  # fmt: skip
    write_profile(
        as_profile(
            CalibrationProfile(
                name="h200-eager", accelerator="h200-sxm", also_for=("h100-sxm",), software=software, evidence=evidence,
                description="PyTorch's operators between GEMMs and at the end of a step, measured on one H200; for software.kernels eager.",
                include=("h200-clamped-experts", "h200-clamps", "eager-permutes"),
            ),
            heads,
        ),
        folder / "h200-eager.yaml",
    )  # fmt: skip


if __name__ == "__main__":
    main()
