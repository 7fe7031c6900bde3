"""Fits the laws of serving operators to every second shape of public tables and writes serving-hopper.yaml.

    python -m lab.profiles.serving_curves /work/shared > hwmodels/data/calibration/serving-hopper.yaml

One robust least-squares fit of the logarithms of all times; errors by family go to stderr. The start of a figure is
a first guess of its family, and figures that no table determines keep it, as `assumed`.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from moesim.hwmodels.accelerator import load_accelerator
from moesim.simulator.scoring.serving_operators import Case
from moesim.simulator.serving.prices import FIGURES, families, peak_flop_per_s, rows_a_group

Array = NDArray[np.float64]
Key = tuple[str, str]
"""Family and figure; `eager-...` families have a call time alone."""

START: dict[str, tuple[float, ...]] = {
    # call us, share of bandwidth, share of peak, edge
    "small": (2.5, 0.8),
    "norm": (2.5, 0.6),
    "cast": (2.5, 0.6),
    "rope": (3.0, 0.5),
    "swiglu": (2.5, 0.6),
    "swiglu-masked": (4.0, 0.6),
    "permute": (4.0, 0.7),
    "permute-scatter": (8.0, 0.6),
    "copy-pack": (3.0, 0.6),
    "elementwise-random": (3.0, 0.5),
    "topk": (6.0, 0.3),
    "gemm": (4.0, 0.8, 0.65, 32.0),
    "gemm-fp8": (5.0, 0.8, 0.7, 32.0),
    "gemm-batched": (4.0, 0.7, 0.6, 16.0),
    "experts": (6.0, 0.85, 0.6, 64.0),
    "experts-masked": (8.0, 0.85, 0.57, 150.0),
    "experts-contiguous": (10.0, 0.75, 0.65, 120.0),
    "experts-fused": (8.0, 0.85, 0.5, 16.0),
    "attention": (7.0, 0.8, 0.55, 128.0),
    "decode-mla": (20.0, 0.8, 0.55, 200.0),
    "decode-gqa": (7.0, 0.8, 0.3, 16.0),
    "decode-sparse": (15.0, 0.6, 0.5, 100.0),
    "prefill-mla": (10.0, 0.8, 0.62, 200.0),
    "prefill-gqa": (9.0, 0.8, 0.6, 200.0),
    "prefill-sparse": (15.0, 0.6, 0.45, 100.0),
    "indexer": (8.0, 0.6, 0.3, 64.0),
    "indexer_topk": (10.0, 0.4),
    "eager-experts": (370.0,),
    "eager-mla": (580.0,),
}
SCALE = {"call_time": 1e-6}
LIMITS = {"call_time": (1.3e-6, 1.0), "bandwidth_fraction": (0.05, 0.95), "compute_fraction": (0.02, 0.9), "edge": (1.0, 4096.0)}
COUNT = 6


class Terms:
    """Operators of all cases as arrays, with the index of the parameter behind each of their figures."""

    def __init__(self, cases: list[Case], keys: list[Key]) -> None:
        index = {key: at for at, key in enumerate(keys)}
        rows, picks, eager = [], [], []
        for number, case in enumerate(cases):
            card = load_accelerator(case.card)
            eager.append(index.get((f"eager-{case.eager}", "call_time"), -1))
            for op in case.operators:
                peak = peak_flop_per_s(card, op)[0] if op.flop else 1.0
                x = rows_a_group(op) if op.flop else 1.0
                memory = (op.bytes_read + op.bytes_written) / card.hbm_bytes_per_s
                rows.append((number, op.launches, memory, op.flop / peak, x))
                found = [
                    next((index[f, figure] for f in families(op) if (f, figure) in index), index["gemm", figure])
                    for figure in FIGURES
                ]
                picks.append(found)
        data = np.array(rows)
        self.case = data[:, 0].astype(int)
        self.launches, self.memory, self.compute, self.x = data[:, 1:].T
        self.pick, self.eager, self.n = np.array(picks), np.array(eager), len(cases)

    def seconds(self, values: Array) -> Array:
        """Seconds of every case."""
        call, share, peak, edge = (values[self.pick[:, at]] for at in range(4))
        one = self.launches * call + np.maximum(
            self.memory / share, self.compute * (1.0 + edge / self.x) / peak
        )
        total = np.bincount(self.case, one, self.n)
        least = np.where(self.eager >= 0, values[self.eager], 0.0)
        return np.maximum(total, least)


def fitted(cases: list[Case]) -> tuple[dict[Key, float], dict[Key, bool]]:
    """Figures by family and name, and whether a table determined them."""
    keys = [(family, figure) for family, start in START.items() for figure, _ in zip(FIGURES, start, strict=False)]
    start = np.array([START[f][FIGURES.index(g)] * SCALE.get(g, 1.0) for f, g in keys])
    seen = [case for case in cases if not case.left_out]
    terms, truth = Terms(seen, keys), np.log([case.seconds for case in seen])
    count: dict[str, int] = defaultdict(int)
    for case in seen:
        count[case.family] += 1
    weight = np.array([(1.0 / count[case.family]) ** 0.5 for case in seen])
    prior = 0.02 * np.mean(weight)

    def residuals(log_values: Array) -> Array:
        errors = (np.log(terms.seconds(np.exp(log_values))) - truth) * weight
        return np.concatenate([errors, prior * (log_values - np.log(start))])

    low = np.log([LIMITS[g][0] for _, g in keys])
    high = np.log([LIMITS[g][1] for _, g in keys])
    result = least_squares(
        residuals, np.clip(np.log(start), low + 1e-6, high - 1e-6), bounds=(low, high), loss="soft_l1",
        f_scale=0.1 * float(np.mean(weight)), max_nfev=200,
    )  # fmt: skip
    slope = np.abs(result.jac[: len(seen)]).sum(0)
    known = {key: bool(s > 0.02) for key, s in zip(keys, slope, strict=True)}
    return dict(zip(keys, np.exp(result.x).tolist(), strict=True)), known
