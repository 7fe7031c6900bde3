"""Writes lab/docs/sparse-attention.md: errors of the modules of sparse attention, by kernel and phase."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median, quantiles

from lab.scoring.sparse_attention import PROFILE, ModuleScore, score_modules
from lab.scoring.sparse_attention_fit import OVERHEAD

from moesim.hwmodels.calibration import load_profile

INTRODUCTION = """\
# Sparse attention

<!-- Written by lab/writers/sparse_page.py. -->

How long one attention module of DeepSeek sparse attention (DSA) or of DeepSeek-V4's compressed attention
takes in inference, against measured modules of SGLang 0.5.14 and vLLM 0.24.0 on one H200, and the kernels
of hyper-connections (mHC) beside them. The 348 measured rows are a sample of the tables of
ai-dynamo/aiconfigurator@095f58a51 (Apache-2.0), and ship as
`lab/scoring/data/sparse-attention.csv`.

A module is priced by its operators (see [the model](../../docs/model/03-operator-times.md)). Its constants are
shares of the roofline by kernel family, and fixed times by framework. They come from half of the rows:
within every kernel, model, module, phase and hidden size the rows stand in the order of the source, and the
second, fourth, ... are left out. The rule was written before any error was seen; the mechanisms at the end
of this page were then chosen with the errors of both halves in view, the constants never. No constant may
let a kernel run faster than its best credible rate: 0.9 of the roofline, 0.75 of the peak for dense
attention, 640 TFLOP/s for sparse prefill (deepseek-ai/FlashMLA), the best measured GEMM for the indexer, and
0.7 to 1 of the best measured GEMM for projections.
"""

BEHIND = """\
## What was tried

1. The core attention of every kernel visits only the keys that exist. FlashMLA's FP8 kernel measured nearly
   the same time for 1,024 and for 4,096 cached tokens, so it now visits its whole list of 2,048 entries.
   vLLM's prefill, which turns the FP8 cache into BF16 first, got worse by that rule, and is left out of it.
2. Without limits on the shares the median was the same (3.7 %), but dense attention and two decode kernels
   came out at their full peak, and the indexer took what they left. With the limits above the constants can
   be believed one by one.
3. SGLang's dense prefill was first given the indexer's work. Its rows with an indexer are not slower than
   those without, so only the indexer's key is computed there.

## What it does not explain

- Prefill with the choice of another layer (GLM-5.2, `skip_indexer`): the measured time of 8 sequences of
  1,024 tokens is 18.2, 12.8 and 10.4 ms behind 4,096, 8,192 and 32,768 cached tokens. Which keys the
  benchmark's list names is not stated.
- CSA in decode: 0.254 ms behind 32,768 cached tokens, and 0.180 behind 131,072.
- Tensor parallelism: every measured row is of one GPU. Heads are shared out, fewer than 64 are padded to 64
  in FlashMLA's kernels, and the indexer is repeated; nothing here checks it.
- The shares of the indexer and of its choice of keys have almost the same dependence on sizes, so that
  their sum is known better than each.
"""


def group_rows(scores: Iterable[ModuleScore]) -> list[str]:
    """One line of the table for every kernel and phase."""
    families: dict[str, list[ModuleScore]] = {}
    for score in scores:
        families.setdefault(score.row.family, []).append(score)
    return [f"| {name} | {summary(own)} |" for name, own in sorted(families.items())]


def summary(scores: list[ModuleScore]) -> str:
    """Rows, median, 90 % point and largest absolute error, and the median signed error."""
    errors = sorted(abs(score.error) for score in scores)
    high = quantiles(errors, n=10, method="inclusive")[-1] if len(errors) > 1 else errors[0]
    signed = median(score.error for score in scores)
    return f"{len(errors)} | {median(errors):.1%} | {high:.1%} | {errors[-1]:.1%} | {signed:+.1%}"


def constants() -> list[str]:
    """One line of the table for every fitted constant."""
    lines = []
    for curve in load_profile(PROFILE).curves:
        use = curve.used_for[0] if curve.used_for else ""
        if "sparse-attention." not in curve.id or use.startswith("elementwise/") or use == "indexer_topk":
            continue
        value = curve.curve.ys[0]
        shown = f"{value * 1e6:.1f} us" if use.startswith(OVERHEAD) else f"{value:.3f}"
        lines.append(f"| {use.replace('module_', '')} | {shown} | {curve.residual.relative:.1%} |")
    return lines


def page() -> str:
    """The page from fresh predictions."""
    scores = score_modules()
    left_out = [s for s in scores if not s.row.calibrates]
    used = [s for s in scores if s.row.calibrates]
    head = (
        "| kernel of the source, phase | rows | median | 90 % | largest | signed |\n|---|---|---|---|---|---|"
    )
    lines = [
        INTRODUCTION,
        "## Rows that were left out of the calibration",
        "",
        head,
        *group_rows(left_out),
        f"| **all, left out** | {summary(left_out)} |",
        f"| without hyper-connections | {summary([s for s in left_out if not s.row.hyper])} |",
        f"| rows of the calibration | {summary(used)} |",
        "",
        "Positive signed errors are predictions that are too slow.",
        "",
        "## Constants",
        "",
        "Shares of the roofline and fixed times, with the median error of the rows in which they appear, at",
        "least 5 %. They stand in `h200-sparse-attention` and `hopper-sparse-attention`, which",
        "`lab/profiles/sparse_attention_profile.py` writes.",
        "",
        "| constant | value | error |",
        "|---|---|---|",
        *constants(),
        "",
        BEHIND,
    ]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    print(page())
