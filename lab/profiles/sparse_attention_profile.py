"""Writes the profiles `h200-sparse-attention` and `hopper-sparse-attention` from half of the modules.

    python -m lab.profiles.sparse_attention_profile

The rows that are left out do not enter: see `lab/scoring/sparse_attention.py`.
"""

from __future__ import annotations

from typing import Any

from lab.scoring.sparse_attention import PROFILE, MeasuredModule, measured_modules
from lab.scoring.sparse_attention_fit import (
    OVERHEAD,
    SLOWEST,
    FittedConstant,
    fit_constants,
    hyper_points,
)
from moesim.hwmodels.accelerator import load_accelerator
from moesim.hwmodels.calibration import PROFILE_DIRECTORY, CalibrationProfile
from moesim.kernels.export import write_profile

SOURCE = (
    "ai-dynamo/aiconfigurator@095f58a51 (Apache-2.0), aic-core/src/aiconfigurator_core/systems/data/h200_sxm"
)
STACKS = "SGLang 0.5.14 and vLLM 0.24.0 on one H200"
TRAINING = {
    "sparse_attention_forward/sglang-flashmla-sparse-prefill": "sparse_attention_forward",
    "sparse_attention_forward/sglang-flashmla-compressed-prefill": "sparse_attention_forward/compressed",
    "indexer/sglang-prefill": "indexer",
}
"""Constants of inference that training uses too, with the operators that they price there."""
TRAINING_PROFILE = "hopper-sparse-attention"
"""Profile of the constants that training uses, which profiles of Hopper accelerators include."""
LEAST_RESIDUAL = 0.05
LARGEST_KEYS = 131072


def entry(name: str, rows: int, residual: float, note: str | None = None) -> dict[str, Any]:
    """Fields that every entry of the profile has."""
    return {
        "id": f"{PROFILE}.{name}",
        "source": f"{SOURCE}: fit of all constants together to {rows} rows that contain it, {STACKS}",
        "kind": "derived",
        "date": "2026-11-22",
        "residual": {
            "relative": round(max(residual, LEAST_RESIDUAL), 3),
            "meaning": "median error of the modules that contain it, at least 5 %",
        },
        "conditions": {"compute_sms": 132, "device": "H200 SXM", "clocks": "not stated"},
        "note": note,
    }


def constant(fitted: FittedConstant) -> dict[str, Any]:
    """One curve for one constant: a share of the roofline, or a fixed time."""
    name = fitted.use.replace("/", ".").replace("module_", "")
    if fitted.use.startswith(OVERHEAD):
        values = {"x_name": "call", "x_unit": "1", "y_name": "time at any size", "y_unit": "us",
                  "points": [[1, round(fitted.value * 1e6, 2)]]}  # fmt: skip
        return (
            entry(name.replace(".", "_"), fitted.rows, fitted.residual) | values | {"used_for": [fitted.use]}
        )
    undetermined = "at the bound of the fit: the rows do not tell this constant from others"
    bound = undetermined if fitted.value >= SLOWEST else None
    extra = [TRAINING[fitted.use]] if fitted.use in TRAINING else []
    return entry(name.replace(".", "_") + "_fraction", fitted.rows, fitted.residual, bound) | {
        "x_name": "keys of one query", "x_unit": "tokens", "y_name": "share of the roofline", "y_unit": "1",
        "points": [[1, round(1.0 / fitted.value, 4)], [LARGEST_KEYS, round(1.0 / fitted.value, 4)]],
        "used_for": [fitted.use, *extra],
    }  # fmt: skip


def hyper(rows: list[MeasuredModule], module: str, use: str) -> dict[str, Any]:
    """Bandwidth curve of one kernel of hyper-connections."""
    points = hyper_points(rows, module)
    return entry(module, len(points), LEAST_RESIDUAL) | {
        "source": f"{SOURCE}/mhc: {len(points)} rows, TileLang kernels of SGLang 0.5.14",
        "kind": "measured",
        "x_name": "bytes read and written", "x_unit": "MB", "y_name": "effective bandwidth", "y_unit": "GB/s",
        "points": [[round(size / 1e6, 4), round(rate / 1e9, 2)] for size, rate in points],
        "used_for": [use],
    }  # fmt: skip


def training_choice(fitted: FittedConstant, bytes_per_s: float) -> dict[str, Any]:
    """The choice of keys in training, at the bandwidth that SGLang's prefill shows."""
    rate = round(bytes_per_s / fitted.value / 1e9, 1)
    return entry("indexer_topk", fitted.rows, fitted.residual) | {
        "x_name": "bytes of scores", "x_unit": "MB", "y_name": "effective bandwidth", "y_unit": "GB/s",
        "points": [[1, rate], [4000, rate]], "used_for": ["indexer_topk"],
    }  # fmt: skip


def main() -> None:
    """Fit, and write the profile into the shipped data."""
    rows = [row for row in measured_modules() if row.calibrates]
    accelerator = load_accelerator("h200-sxm")
    fitted = fit_constants(rows, accelerator)
    streams = [hyper(rows, f"mhc_{site}", f"elementwise/hyper_{site}") for site in ("pre", "post")]
    top_k = next(c for c in fitted if c.use == "indexer_topk/sglang-prefill")
    curves = [constant(c) for c in fitted]
    trained = [c for c in curves if set(c["used_for"]) & {*TRAINING.values()}]
    trained.append(training_choice(top_k, accelerator.hbm_bytes_per_s))
    about = {
        "software": STACKS,
        "evidence": "Kernel-level measurements of attention modules; every second row of the open table "
        "is left out of the fit and scores it (lab/docs/sparse-attention.md). No training step and no "
        "serving plan was looked at.",
    }
    shared = about | {
        "name": TRAINING_PROFILE,
        "accelerator": "any",
        "description": "Sparse attention and its indexer in training on Hopper, whose shares of the roofline "
        "were measured on one H200 in inference.",
        "include": ["sparse-attention-priors"],
        "curves": trained,
    }
    here = about | {
        "name": PROFILE,
        "accelerator": "h200-sxm",
        "description": "Modules of sparse attention in inference and hyper-connections on one H200.",
        "include": [TRAINING_PROFILE, "generic-priors"],
        "curves": [*(c for c in curves if c not in trained), *streams],
    }
    for data in (shared, here):
        profile = CalibrationProfile.model_validate(data)
        print(write_profile(profile, PROFILE_DIRECTORY / f"{profile.name}.yaml"))


if __name__ == "__main__":
    main()
