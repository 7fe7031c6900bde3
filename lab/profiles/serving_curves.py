"""Fits the laws of serving operators to every second shape of public tables and writes serving-hopper.yaml.

    python -m lab.profiles.serving_curves SHARED > hwmodels/data/calibration/serving-hopper.yaml

One robust least-squares fit of the logarithms of all times; errors by family go to stderr. The start of a
figure is a first guess of its family, and figures that no table determines keep it, as `assumed`.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
from lab import packed
from numpy.typing import NDArray
from scipy.optimize import least_squares

from moesim.hwmodels.accelerator import load_accelerator
from moesim.simulator.model.operator import GEMM_CLASSES
from moesim.simulator.model.catalogue import load_model
from moesim.simulator.model.primitives import BF16
from moesim.simulator.scoring.serving_operators import Case, all_cases
from moesim.simulator.serving.attention import core
from moesim.simulator.serving.linear import product
from moesim.simulator.serving.operators import ExpertLoad, Split, experts, router
from moesim.simulator.serving.prices import families, peak_flop_per_s, rows_a_group

FIGURES = ("call_time", "bandwidth_fraction", "compute_fraction", "edge", "depth_time")
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
    "permute-align": (4.0, 0.7),
    "permute-routing": (12.0, 0.7),
    "permute-sum-marlin": (4.0, 0.7),
    "permute-reduce": (4.0, 0.7),
    "swiglu-marlin": (2.5, 0.6),
    "copy-pack": (3.0, 0.6),
    "elementwise-random": (3.0, 0.5),
    "topk": (6.0, 0.3),
    "gemm": (2.5, 0.8, 0.65, 32.0, 1),
    "gemm-fp8": (3.0, 0.8, 0.7, 32.0, 0.7),
    "gemm-batched": (4.0, 0.7, 0.6, 16.0, 1),
    "experts": (6.0, 0.85, 0.6, 64.0, 1),
    "experts-masked": (8.0, 0.85, 0.57, 150.0, 0.7),
    "experts-contiguous": (10.0, 0.75, 0.65, 120.0, 0.7),
    "experts-fused": (8.0, 0.85, 0.5, 16.0, 1.2),
    "experts-fused-few": (4.0, 0.85, 0.5, 16.0, 3.0),
    "experts-fused-many": (4.0, 0.85, 0.5, 64.0, 3.0),
    "experts-marlin": (4.0, 0.8, 0.3, 16.0, 3.0),
    "experts-triton": (4.0, 0.8, 0.5, 64.0, 3.0),
    "attention": (7.0, 0.8, 0.55, 128.0),
    "decode-mla": (20.0, 0.8, 0.55, 200.0),
    "decode-gqa": (7.0, 0.8, 0.3, 16.0),
    "decode-gqa-fa3": (9.0, 0.8, 0.3, 16.0),
    "decode-gqa-fa3-window": (9.0, 0.5, 0.3, 16.0),
    "decode-sparse": (10.0, 0.6, 0.5, 100.0),
    "prefill-mla": (10.0, 0.8, 0.62, 200.0),
    "prefill-gqa": (9.0, 0.8, 0.6, 200.0),
    "prefill-sparse": (15.0, 0.6, 0.45, 100.0),
    "indexer": (8.0, 0.6, 0.3, 64.0),
    "indexer_topk": (10.0, 0.4),
    "prefill-sparse-fp8": (15.0, 0.6, 0.4, 100.0),
    "decode-sparse-fp8": (15.0, 0.6, 0.4, 100.0),
    "decode-csa": (20.0, 0.6, 0.4, 100.0),
    "decode-hca": (20.0, 0.6, 0.4, 100.0),
    "prefill-csa": (20.0, 0.6, 0.4, 100.0),
    "prefill-hca": (20.0, 0.6, 0.4, 100.0),
    "elementwise-mix": (9.0, 0.45),
    "elementwise-spread": (4.0, 0.85),
    "elementwise-dsa-vllm": (90.0,),
    "elementwise-dsa-sglang": (20.0,),
    "elementwise-csa-sglang": (60.0,),
    "elementwise-hca-sglang": (60.0,),
    "eager-experts": (370.0, 0.3),
    "eager-mla": (580.0, 0.5),
    "eager-dsa": (1500.0, 0.3),
}
RESULT, RESULT_EXPERTS = "2026-11-26-h100-x2-serving.json", "2026-11-26-h100-serving-experts.json"
SCALE = {"call_time": 1e-6, "depth_time": 1e-9}
LIMITS = {
    "call_time": (1.8e-6, 1.0),
    "bandwidth_fraction": (0.05, 0.93),
    "compute_fraction": (0.1, 0.8),
    "edge": (1.0, 2048.0),
    "depth_time": (0.05e-9, 10e-9),
}
CONTRADICTORY = {"DSA prefill, sglang, shared choice"}
"""Families that are scored and not fitted: more keys take less time there (35 ms, then 14 ms), as the
benchmark of a layer without an indexer hands it no choice of keys."""
FIXED = {
    ("prefill-gqa", "compute_fraction"),
    ("prefill-gqa", "edge"),
    ("decode-gqa", "bandwidth_fraction"),
    ("copy-pack", "call_time"),
}
MOST_CALL_S = 20e-6


class Terms:
    """Operators of all cases as arrays, with the index of the parameter behind each of their figures."""

    def __init__(self, cases: list[Case], keys: list[Key]) -> None:
        """Lay the operators of `cases` out; `keys`: the parameters in order."""
        index = {key: at for at, key in enumerate(keys)}
        rows, picks, eager = [], [], []
        for number, case in enumerate(cases):
            card = load_accelerator(case.card)
            eager.append([index.get((f"eager-{case.eager}", name), -1) for name in FIGURES[:2]])
            for op in case.operators:
                peak = peak_flop_per_s(card, op)[0] if op.flop else 1.0
                x, depth = (
                    (rows_a_group(op), op.gemm.k if op.cls in GEMM_CLASSES else 0.0)
                    if op.gemm
                    else (1.0, 0.0)
                )
                memory = (op.bytes_read + op.bytes_written) / card.hbm_bytes_per_s
                rows.append((number, op.launches, memory, op.flop / peak, x, depth))
                found = [
                    next(
                        (index[f, figure] for f in families(op) if (f, figure) in index),
                        index["gemm", figure],
                    )
                    for figure in FIGURES
                ]
                picks.append(found)
        data = np.array(rows)
        self.case = data[:, 0].astype(int)
        self.launches, self.memory, self.compute, self.x, self.depth = data[:, 1:].T
        self.pick, self.eager, self.n = np.array(picks), np.array(eager), len(cases)

    def seconds(self, values: Array) -> Array:
        """Seconds of every case."""
        call, share, peak, edge, depth = (values[self.pick[:, at]] for at in range(5))
        work = np.maximum(self.memory / share, self.compute * (1.0 + edge / self.x) / peak)
        one = self.launches * call + work + self.depth * depth
        total = np.bincount(self.case, one, self.n)
        host, lead = (np.where(at >= 0, values[at], 0.0) for at in self.eager.T)
        return np.maximum(total + lead * host, host)


def fitted(cases: list[Case]) -> tuple[dict[Key, float], dict[Key, bool]]:
    """Figures by family and name, and whether a table determined them."""
    keys = [
        (family, figure) for family, start in START.items() for figure, _ in zip(FIGURES, start, strict=False)
    ]
    low_prior = 0.05
    start = np.array([START[f][FIGURES.index(g)] * SCALE.get(g, 1.0) for f, g in keys])
    seen = [case for case in cases if not case.left_out and case.family not in CONTRADICTORY]
    terms, truth = Terms(seen, keys), np.log([case.seconds for case in seen])
    count: dict[str, int] = defaultdict(int)
    for case in seen:
        count[case.family] += 1
    weight = np.array([(1.0 / count[case.family]) ** 0.5 for case in seen])
    prior = low_prior * np.mean(weight)

    stiff = np.array([300.0 if key in FIXED else 1.0 for key in keys])

    def residuals(log_values: Array) -> Array:
        errors = (np.log(terms.seconds(np.exp(log_values))) - truth) * weight
        return np.concatenate([errors, stiff * prior * (log_values - np.log(start))])

    low = np.log([LIMITS[g][0] for _, g in keys])
    longest: list[float] = [
        MOST_CALL_S
        if g == "call_time" and "-" in f and START[f][1:2] and not f.startswith("eager")
        else LIMITS[g][1]
        for f, g in keys
    ]
    high = np.log(longest)
    result = least_squares(
        residuals, np.clip(np.log(start), low + 1e-6, high - 1e-6), bounds=(low, high), loss="soft_l1",
        f_scale=0.1 * float(np.mean(weight)), max_nfev=200,
    )  # fmt: skip
    slope = np.abs(result.jac[: len(seen)]).sum(0)
    known = {key: bool(s > 0.02) for key, s in zip(keys, slope, strict=True)}
    return dict(zip(keys, np.exp(result.x).tolist(), strict=True)), known


# -- the file ----------------------------------------------------------------------------------------

HEAD = """\
# Written by lab/profiles/serving_curves.py from public tables.
name: serving-hopper
accelerator: any
software: "SGLang 0.5.10 and 0.5.14, vLLM 0.24, DeepGEMM, FlashMLA, FlashAttention 3, FlashInfer, Triton"
description: Laws of the kernels of inference engines, by family (eq. Q2).
evidence: >-
  One fit of all families to every second shape of public tables on H200 and H800; residuals come from the
  other shapes (1.48 times the median error). Families without a table are first guesses, marked as assumed.
include: [serving-exchange]
kernel_laws:
"""
FIELDS = {"call_time": ("call_us", 1e6),
          "bandwidth_fraction": ("bandwidth", 1.0), "compute_fraction": ("peak", 1.0),
          "edge": ("edge", 1.0), "depth_time": ("depth_ns", 1e9)}  # fmt: skip
AIC, INFERSIM = "ai-dynamo/aiconfigurator@095f58a h200_sxm", "alibaba/InferSim@f2293da bench_data, H800"
FRONTIER, OWN = "NetX-lab/Frontier@a4b22df h800-operators", f"moesim on an H100, lab/results/{RESULT}.xz"
EXPERTS = f"moesim on an H100, lab/results/{RESULT_EXPERTS}.xz: kernels of the wheel of vLLM 0.20.2"
SOURCES = {
    "experts-fused": FRONTIER,
    "experts": f"{AIC} wideep MoE (SGLang 0.5.10) and {INFERSIM}",
    "experts-marlin": EXPERTS,
    "experts-triton": EXPERTS,
    "swiglu-marlin": EXPERTS,
    "permute-align": EXPERTS,
    "permute-routing": EXPERTS,
    "permute-sum-marlin": EXPERTS,
    "permute-reduce": EXPERTS,
    "topk": EXPERTS,
    "gemm": f"{OWN} and {RESULT_EXPERTS}.xz, and {FRONTIER}",
    "gemm-fp8": f"{INFERSIM}, and {AIC} MLA and DSA modules",
    "decode-gqa": FRONTIER,
    "decode-gqa-fa3": f"{EXPERTS} (FlashAttention 3)",
    "prefill-gqa": FRONTIER,
    "decode-mla": f"{INFERSIM}, and {AIC} MLA modules (SGLang 0.5.10)",
    "prefill-mla": f"{INFERSIM}, and {AIC} MLA modules (SGLang 0.5.10)",
    "": f"{AIC} modules (SGLang 0.5.10 and 0.5.14, vLLM 0.24)",
}
ASSUMED = {
    ("decode-gqa", "bandwidth"): "assumed, 0.7 to 0.9: FlashInfer and FlashAttention 3 at long contexts",
    (
        "prefill-gqa",
        "peak",
    ): "moesim measurement on 8x H200 (2026-11-20): attention forward 583 to 603 TFLOP/s of 989",
}


def source_of(family: str) -> str:
    """The table behind a family."""
    parts = family.split("-")
    names = ("-".join(parts[:n]) for n in range(len(parts), -1, -1))
    return next(SOURCES[name] for name in names if name in SOURCES)


def entry(family: str, figures: dict[str, float], known: bool, residual: float) -> str:
    """One law as YAML."""
    numbers = {FIELDS[name][0]: value * FIELDS[name][1] for name, value in figures.items()}
    if family.startswith("eager"):
        numbers["lead"] = numbers.pop("bandwidth")
    source = source_of(family) if known else "first guess after neighbouring families; no table determines it"
    source += "".join(f"; {field}: {text}" for (of, field), text in ASSUMED.items() if of == family)
    error = residual if known else 0.4
    meaning = "1.48 x median error of the shapes left out" if known else "assumed"
    body = "".join(f"    {name}: {value:.4g}\n" for name, value in numbers.items())
    return (
        f"  - id: serving.{family}\n{body}"
        f'    source: "{source}"\n    kind: {"derived" if known else "assumed"}\n'
        f'    date: "2026-11-26"\n    residual: {{relative: {error:.3f}, meaning: "{meaning}",\n'
        f"      elsewhere: {{architecture: Hopper, relative: {min(error + 0.15, 0.6):.2f}, "
        'meaning: "assumed: the same shares"}}\n'
    )


def own_products() -> list[Case]:
    """BF16 products of few and many rows with cold weights, as measured on an H100
    (lab/studies/serving_calls.py, serving_experts.py).
    """
    found = []
    for kind, *sizes, us in [*packed.read(RESULT)["rows"], *packed.read(RESULT_EXPERTS)["rows"]]:
        if kind == "bf16":
            m, n, k = (float(size) for size in sizes)
            op = product("product", m, n, k, "bf16")
            found.append(Case("GEMM BF16, cold weights", "h100-sxm", (m,), (op,), us * 1e-6))
    return found


def own_experts() -> list[Case]:
    """MXFP4 experts of gpt-oss-120b, the choice of experts and decode attention, as measured on an H100
    (lab/studies/serving_experts.py).
    """
    shape, found = load_model("gpt-oss-120b"), []
    moe, card = shape.moe, "h100-sxm"
    assert moe is not None
    for kind, *sizes, us in packed.read(RESULT_EXPERTS)["rows"]:
        if kind in ("marlin", "triton"):
            ranks, tokens, part = sizes
            split = Split(tp=ranks, expert_tp=ranks, experts="mxfp4", kernels=kind)
            load = ExpertLoad.of(moe, split, float(tokens))
            ops = experts(moe, shape.hidden, load, split, decode=True)
            if part != "all":  # Triton's second product sums a token's rows
                ends = ("gate_up",) if part == "gate_up" else ("down", "sum")[: 1 + (kind == "triton")]
                ops = [op for op in ops if op.name.endswith(ends)]
            elif kind == "triton":
                ops = [router(moe, shape.hidden, float(tokens))[1], *ops]
            name = f"MXFP4 experts, {kind}, {part}"
            found.append(Case(name, card, (float(tokens),), tuple(ops), us * 1e-6))
        elif kind == "topk":
            ops = router(moe, shape.hidden, float(sizes[0]))[1:]
            found.append(Case("choice of experts", card, (float(sizes[0]),), tuple(ops), us * 1e-6))
        elif kind == "decode" and sizes[4]:  # with vLLM's number of splits in a graph
            ranks, batch, keys, window, _ = sizes
            seen = float(batch * min(keys, window or keys))
            read = seen * max(8 // ranks, 1) * 64 * 2 * BF16
            kernel = "decode-gqa-fa3-window" if window else "decode-gqa-fa3"
            op = core("decode", kernel, float(batch), seen, (64.0, 64.0), read, 64.0 / ranks)
            found.append(
                Case(
                    f"GQA decode, sinks{', window' if window else ''}",
                    card,
                    (float(batch), ranks),
                    (op,),
                    us * 1e-6,
                )
            )
    return found


def main() -> None:
    """Fit, and write the profile to stdout and the errors by family to stderr."""
    cases = [*all_cases(Path(sys.argv[1])), *own_products(), *own_experts()]
    cases = [case for case in cases if case.given_s is None]
    values, known = fitted(cases)
    keys = list(values)
    terms = Terms(cases, keys)
    errors = np.abs(
        terms.seconds(np.array([values[key] for key in keys])) / [case.seconds for case in cases] - 1.0
    )
    by_family: dict[str, list[float]] = defaultdict(list)
    used: dict[int, set[str]] = {at: set() for at in range(len(keys))}
    for number, row in zip(terms.case, terms.pick, strict=True):
        for at in row:
            used[int(at)].add(cases[int(number)].family)
    for case, error in zip(cases, errors, strict=True):
        if case.left_out:
            by_family[case.family].append(float(error))
    medians = {family: float(np.median(found)) for family, found in by_family.items()}
    print(HEAD, end="")
    for family in START:
        own = {figure: values[family, figure] for figure in FIGURES if (family, figure) in values}
        at = [number for number, key in enumerate(keys) if key[0] == family]
        seen = [medians[name] for number in at for name in used[number] if name in medians]
        residual = 1.48 * float(np.median(seen)) if seen else 0.1
        print(entry(family, own, any(known[family, figure] for figure in own), max(residual, 0.05)), end="")
    for family in sorted(medians):
        print(
            f"{family:40s} {len(by_family[family]):4d} left out, median {medians[family]:.3f}",
            file=sys.stderr,
        )


if __name__ == "__main__":
    main()
