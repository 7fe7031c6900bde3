"""Chooses the measured curve of a core attention by its kernels, heads and number format (pure).

A curve is known by its use: `attention_forward` or `attention_backward`, then the variant of
`simulator/model/attention/core.py`. Curves measured at one width of heads alone end in it: `128`, or `192`
for the heads of 192 and 128 elements of multi-head latent attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from moesim.hwmodels.calibration import MeasuredCurve
from moesim.simulator.model.operator import LOW_ATTENTION, Operator

COMMON_HEAD = 128
"""Elements of a head; curves for `<class>/128` were measured at this width alone, and heads of up to 192
elements, such as those of MLA, take their rates with a note where none was measured for them."""
LATENT_HEAD = 192

Curves = Mapping[tuple[str, bool | None], MeasuredCurve]


class AttentionCurve(NamedTuple):
    """A curve of FLOP/s over sequence or window, and a note if it was measured for other kernels."""

    curve: MeasuredCurve
    note: str = ""


def low_format(op: Operator) -> str:
    """The 8-bit format of a core attention's operands: `fp8`, `mxfp8`, or empty."""
    first = op.variant.split("_")[0]
    return first if first in LOW_ATTENTION else ""


def in_bf16(variant: str) -> str:
    """The variant of the same kernel in BF16."""
    return variant.partition("_")[2]


def attention_curve(curves: Curves, op: Operator, has_prior: bool) -> AttentionCurve | None:
    """Curve of a core attention in BF16; None: take a prior.

    Rates of the same kernel serve narrow and wide heads where these were not measured, and those of full
    causal attention serve windows and flex_attention where there is no prior (`has_prior`) for them either.
    """
    own = exact_curve(curves, op)
    if own is not None:
        return own
    full = curves.get((op.cls, None)) or curves.get((f"{op.cls}/{COMMON_HEAD}", None))
    base = "_".join(part for part in op.variant.split("_") if not part.isdigit())
    near = curves.get((f"{op.cls}/{base}", None)) if base else full
    note = f"{op.cls} with variant {op.variant} at the rates of "
    if near is not None:
        return AttentionCurve(near, f"{note}{near.id}, which has other heads")
    if has_prior or full is None:
        return None
    return AttentionCurve(full, f"{note}{full.id}, which is full causal attention of another kernel")


def exact_curve(curves: Curves, op: Operator) -> AttentionCurve | None:
    """Curve of these very kernels in their format, at the heads measured next to theirs."""
    assert op.gemm is not None
    wide = op.gemm.k > COMMON_HEAD
    named = f"{op.cls}/{op.variant}" if op.variant else op.cls
    sized = any(part.isdigit() for part in op.variant.split("_"))
    if wide and not sized:
        latent = curves.get((_joined(op, LATENT_HEAD), None))
        if latent is not None:
            return AttentionCurve(latent)
    own = curves.get((named, None))
    if own is not None:
        return AttentionCurve(own)
    common = None if op.variant else curves.get((_joined(op, COMMON_HEAD), None))
    if common is None:
        return None
    note = f"{op.cls} with heads of {op.gemm.k:g} elements at the rates of {common.id}" if wide else ""
    return AttentionCurve(common, note)


def _joined(op: Operator, width: int) -> str:
    return f"{op.cls}/{op.variant}_{width}" if op.variant else f"{op.cls}/{width}"
