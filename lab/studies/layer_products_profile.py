"""Writes the calibration profiles `h200-products` and `h100-products` from a result of `layer_products.py`.

From 2,048 tokens on, a weight gradient took flop / r + 8 B n k / B_add; r and one B_add are fitted to these
kernel times (relative least squares over both formats). Its table holds the time of every row without the
second term. `h100-products` follows by the rules of `moesim transfer`.

Usage: python -m lab.studies.layer_products_profile RESULT.json FOLDER
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from moesim.hwmodels.accelerator import load_accelerator
from moesim.hwmodels.calibration import CalibrationProfile
from moesim.kernels.calibrate.transfer import transfer
from moesim.kernels.export import write_profile

LONG = 2048
"""Fewest tokens of the fit; with fewer, a weight gradient's GEMM cannot be separated from buffer traffic."""
SHORTEST = 1024
CONDITIONS = {
    "compute_sms": 132,
    "device": "NVIDIA H200",
    "driver": "580.159.04",
    "clocks": "not pinned, 1290 to 1980 MHz, median 1485, at most 705 W",
}
FAMILIES = {
    ("forward", "fp8"): ("gemm", "tensor", "one scale a tensor, fast accumulation"),
    ("dgrad", "fp8"): ("gemm", "tensor-split", "one scale a tensor, E4M3 times E5M2, split accumulation"),
    ("wgrad", "fp8"): ("wgrad_gemm", "tensor", "one scale a tensor, split accumulation"),
    ("both", "bf16"): ("gemm", "", "forward and input gradient"),
    ("wgrad", "bf16"): ("wgrad_gemm", "", "weight gradient"),
}


def seconds(row: dict[str, Any]) -> float:
    """Median seconds over the rounds."""
    return statistics.median(row["us"]) * 1e-6


def buffer_bytes(row: dict[str, Any]) -> float:
    """Bytes read and written in the FP32 buffer of a weight gradient."""
    return 8.0 * float(row["n"]) * float(row["k"])


def fitted_rate(rows: list[dict[str, Any]]) -> float:
    """Bytes/s of the FP32 buffer, fitted together with one GEMM rate r for each format."""
    # Unknowns are seconds per FLOP in FP8 and in BF16 and seconds per byte; each row is divided by its time.
    normal = [[0.0] * 4 for _ in range(3)]
    for row in rows:
        t, fp8 = seconds(row), row["dtype"] == "fp8"
        line = [row["flop"] / t * fp8, row["flop"] / t * (not fp8), buffer_bytes(row) / t, 1.0]
        for i in range(3):
            for j in range(4):
                normal[i][j] += line[i] * line[j]
    for i in range(3):
        for j in range(i + 1, 3):
            factor = normal[j][i] / normal[i][i]
            normal[j] = [b - factor * a for a, b in zip(normal[i], normal[j], strict=True)]
    return normal[2][2] / normal[2][3]


def points(kind: str, dtype: str, rows: list[dict[str, Any]], add: float) -> list[list[float]]:
    """Rows (m, n, k, groups, TFLOP/s) with the shapes of the simulator's operators."""
    out = []
    for row in rows:
        if row["dtype"] != dtype or row["kind"] not in ((kind,) if kind != "both" else ("forward", "dgrad")):
            continue
        n, k, tokens = row["n"], row["k"], row["tokens"]
        shape = {"forward": (tokens, n, k), "dgrad": (tokens, k, n), "wgrad": (n, k, tokens)}[row["kind"]]
        took = seconds(row)
        if row["kind"] == "wgrad":
            if tokens < SHORTEST:
                continue
            took -= buffer_bytes(row) / add
        out.append([*shape, 1, round(row["flop"] / took * 1e-12, 1)])
    return sorted(out, key=lambda p: (p[1], p[2], p[0]))


def profile_of(meta: dict[str, Any], rows: list[dict[str, Any]]) -> CalibrationProfile:
    """The profile with a table for every kernel family and the rate of accumulation."""
    long = [r for r in rows if r["kind"] == "wgrad" and r["tokens"] >= LONG]
    add = fitted_rate(long)
    sizes = sorted(buffer_bytes(r) / 1e6 for r in long)
    entry = {"date": meta["date"], "conditions": CONDITIONS}
    source = (
        f"benchmarks/gpu/layer_products.py on one {meta['gpu']}: cuBLASLt {meta['cublaslt']}, torch "
        f"{meta['torch']}, first heuristic, 32 MiB of workspace"
    )
    tables = [
        entry
        | {
            "id": f"h200-products.{cls}_{dtype}{'_' + variant if variant else ''}",
            "cls": cls,
            "dtype": dtype,
            "variant": variant,
            "sm_aware": False,
            "unit": "TFLOP/s",
            "source": f"{source}; {text}",
            "kind": "derived" if kind == "wgrad" else "measured",
            "note": "less the traffic of the FP32 buffer (h200-products.accumulate)"
            if kind == "wgrad"
            else None,
            "residual": {"relative": 0.03, "meaning": "spread of three rounds, mostly under 3 %"},
            "points": points(kind, dtype, rows, add),
        }
        for (kind, dtype), (cls, variant, text) in FAMILIES.items()
    ]
    curve = entry | {
        "id": "h200-products.accumulate",
        "x_name": "bytes read and written of the FP32 buffer",
        "x_unit": "MB",
        "y_name": "bytes over the time that they add",
        "y_unit": "GB/s",
        "points": [[round(size, 1), round(add / 1e9)] for size in (sizes[0], sizes[-1])],
        "used_for": ["wgrad_gemm/accumulate"],
        "source": f"{source}; {len(long)} weight gradients from {LONG} tokens on: flop / r + bytes / this",
        "kind": "derived",
        "residual": {
            "relative": 0.05,
            "meaning": "FP8 alone gives 4.97 TB/s, BF16 5.24; rms of the times 3 %",
        },
    }
    return CalibrationProfile.model_validate(
        {
            "name": "h200-products",
            "accelerator": "h200-sxm",
            "software": "cuBLASLt 13.1, as Transformer Engine calls it",
            "description": "Products of linear layers in the formats and directions of Transformer Engine.",
            "evidence": "Measured for their own sake: forward, input gradient and weight gradient of layers "
            "of published models, back to back at sustained power. No training step was looked at.",
            "gemm_tables": tables,
            "curves": [curve],
        }
    )


def main() -> None:
    """Read the result and write both profiles, each on top of its accelerator's other entries."""
    result, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    here = profile_of(result["meta"], result["rows"])
    h200, h100 = load_accelerator("h200-sxm"), load_accelerator("h100-sxm")
    there = transfer(here, h200, h100, name="h100-products")
    for profile, rest in ((here, "h200-8gpu"), (there, "h100-from-h200")):
        write_profile(profile.model_copy(update={"include": (rest,)}), folder / f"{profile.name}.yaml")


if __name__ == "__main__":
    main()
