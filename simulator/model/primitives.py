"""Builds the primitive operators with their bytes and FLOPs, by one function per kind of kernel.

Shapes are in elements; `m` counts token rows. Bytes are those that a kernel must read and write in global
memory once. Caches are not modelled, and measured effective bandwidths are defined over these bytes.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from moesim.simulator.model.operator import Direction, Dtype, GemmShape, Operator, OperatorClass, Work
from moesim.simulator.model.precision import BLOCK_BYTES, BYTES_PER_ELEMENT, FP8_TILE, Blocks, row_bytes

BF16 = 2.0
FP32 = 4.0
SPECIAL_CAST_BYTES = 1.5
"""Bytes of E5M6 (12 bits), the format of the cached input of the linear layer after attention (DeepSeek-V3
report 3.3.3)."""


def gemm(
    name: str,
    direction: Direction,
    m: float,
    n: float,
    k: float,
    dtype: Dtype,
    *,
    cls: OperatorClass = "gemm",
    groups: int = 1,
    per_received_row: bool = False,
    variant: str = "",
) -> Operator:
    """A GEMM [m, k] x [k, n]; in a grouped one m (k of a weight gradient) is the sum over the groups.

    Eq. C1: flop = 2 m n k. Outputs are BF16; a weight gradient reads and writes an FP32 accumulator.
    """
    element = BYTES_PER_ELEMENT[dtype]
    added = 0.0
    if cls == "wgrad_gemm":
        written = groups * m * n * FP32
        read, added = k * (m + n) * element + written, 2.0 * written
    else:
        read = (m * k + groups * n * k) * element
        written = m * n * BF16
    return Operator(
        name,
        cls,
        direction,
        dtype,
        flop=2.0 * m * n * k,
        bytes_read=read,
        bytes_written=written,
        gemm=GemmShape(m, int(n), k, groups),
        per_received_row=per_received_row,
        variant=variant,
        accumulated_bytes=added,
    )


def move(
    name: str,
    cls: OperatorClass,
    direction: Direction,
    read: float,
    written: float,
    *,
    variant: str = "",
    launches: int = 1,
    per_received_row: bool = False,
    dtype: Dtype = "bf16",
) -> Operator:
    """A memory-bound kernel, of which only the bytes count."""
    return Operator(
        name,
        cls,
        direction,
        dtype,
        bytes_read=read,
        bytes_written=written,
        variant=variant,
        launches=launches,
        per_received_row=per_received_row,
    )


UNFUSED_INPUTS = frozenset({"o_proj"})
"""GEMMs whose input does not come from a norm or activation kernel, so that a kernel of its own casts it."""
COLUMN_PARALLEL = frozenset({"qkv_proj", "q_proj", "q_up", "kv_up"})
"""Projections of attention whose outputs tensor parallelism splits, as it splits `gate_up` of an FFN."""


def _casts_input(w: Work, name: str) -> bool:
    """Whether a kernel of its own casts the input of a linear layer and transposes it at once."""
    return name in UNFUSED_INPUTS or (w.separate_casts and name.endswith(".down"))


def _row_parallel(name: str) -> bool:
    """Whether tensor parallelism splits the inputs of a layer, and not its outputs."""
    return name == "o_proj" or name.endswith(".down")


AMAX_LAUNCHES = 3
"""Kernels of a current scale: one zeroes the largest element, one finds it, one derives the scale
(NVIDIA/TransformerEngine@v2.9 `common/recipe/current_scaling.cu`)."""


def one_scale_cast(
    w: Work, name: str, d: Direction, m: float, n: float, variant: str = "tensor", *, groups: int = 0
) -> list[Operator]:
    """Cast of [m, n] with one scale, or one for each of `groups` experts; current scales read it once more.

    Experts with delayed scales share a kernel, those with current ones have kernels of their own, from 2.7 to
    2.18 (NVIDIA/TransformerEngine `pytorch/csrc/extensions/cast.cpp`, `multi_tensor_quantize_impl`).
    """
    out = cast(name, d, m, n, variant, per_row=groups > 0)
    if not w.current_scales:
        return [out]
    each = max(1, groups)
    largest = replace(
        out,
        name=f"{name}.amax",
        dtype="bf16",
        bytes_written=0.0,
        variant="amax",
        launches=AMAX_LAUNCHES * each,
    )
    return [largest, replace(out, launches=each)]


_CAST_BYTES: dict[str, tuple[float, float]] = {
    # variant: bytes per element read, written (scales come on top)
    "token": (BF16, 1.0),
    "channel": (BF16, 1.0),
    "channel_fp8": (1.0, 1.0),
    "back": (1.0, BF16),
    "tensor": (BF16, 2.0),
    "row": (BF16, 1.0),
    "special": (BF16, SPECIAL_CAST_BYTES),
    "special_back": (SPECIAL_CAST_BYTES, BF16),
}


def cast(name: str, d: Direction, m: float, n: float, variant: str, *, per_row: bool = False) -> Operator:
    """A cast of [m, n] to or from FP8.

    The variants quantise in 1x128 tiles along the row ("token"), or in 128x1 tiles with a transpose
    ("channel" from BF16, "channel_fp8" from FP8), convert back to BF16 ("back"), convert to and from the
    12-bit cache format ("special", "special_back"), or quantise with one scale and write both the tensor and
    its transpose ("tensor"), or the tensor alone ("row").
    """
    read, written = _CAST_BYTES[variant]
    scales = 0.0 if variant in ("tensor", "row") else FP32 * m * n / FP8_TILE
    source_is_fp8 = variant in ("back", "channel_fp8", "special_back")
    target_is_fp8 = variant not in ("back", "special_back")
    return move(
        name,
        "cast",
        d,
        m * n * read + scales * source_is_fp8,
        m * n * written + scales * target_is_fp8,
        variant=variant,
        per_received_row=per_row,
        dtype="fp8",
    )


def scale_transpose(name: str, d: Direction, m: float, n: float, *, per_row: bool = False) -> Operator:
    """Transpose of the scales of [m, n] into the order that the GEMM reads (dense: one kernel of 32 CTAs)."""
    size = FP32 * m * n / FP8_TILE
    variant = "row_scales" if per_row else "scales"
    return move(name, "transpose", d, size, size, variant=variant, per_received_row=per_row, dtype="fp8")


def weight_transpose(name: str, d: Direction, n: float, k: float, groups: int = 1) -> Operator:
    """Transpose of an FP8 weight [n, k], for the GEMM that contracts over the other dimension."""
    size = groups * n * k
    return move(name, "transpose", d, size, size, variant="weight", dtype="fp8")


def norm(name: str, d: Direction, m: float, n: float, *, residual: bool = False) -> Operator:
    """RMSNorm of [m, n]; with `residual` the kernel also adds and writes the residual stream."""
    size = m * n * BF16 * (2.0 if residual else 1.0)
    return move(name, "norm", d, size, size, variant="forward_add" if residual else "forward")


def norm_backward(name: str, m: float, n: float) -> Operator:
    """Input and weight gradient of an RMSNorm: main kernel, finalise, accumulate (three launches)."""
    return move(name, "norm", "I", 2.0 * m * n * BF16, m * n * BF16, variant="backward", launches=3)


def add(name: str, d: Direction, m: float, n: float) -> Operator:
    """Sum of two BF16 tensors [m, n]."""
    return move(name, "elementwise", d, 2.0 * m * n * BF16, m * n * BF16, variant="add")


def scale(name: str, d: Direction, m: float, n: float) -> Operator:
    """Multiplication of a BF16 tensor [m, n] by a scalar (residual branch or its gradient)."""
    return move(name, "elementwise", d, m * n * BF16, m * n * BF16, variant="scale")


def linear_forward(
    w: Work, name: str, m: float, n: float, k: float, *, cast_input: bool = True
) -> list[Operator]:
    """y = x W^T. In FP8 the input is cast first (unless another kernel did) and its scales are transposed."""
    out: list[Operator] = []
    if w.fp8:
        if cast_input:
            out.append(cast(f"{name}.cast", "F", m, k, "token"))
        out.append(scale_transpose(f"{name}.scales", "F", m, k))
    if w.fp8_tensor and _casts_input(w, name):
        out += one_scale_cast(w, f"{name}.cast", "F", m, k)
    elif w.fp8_tensor and w.current_scales and not name.endswith(".down"):
        # The norm before cannot write FP8 with a scale that it does not know yet.
        out += one_scale_cast(w, f"{name}.cast", "F", min(m, w.norm_tokens), k, "row")
    if w.separate_casts or not name.endswith(".down"):  # else the activation's kernel writes the blocks
        out += block_cast(w, f"{name}.cast", "F", m if _casts_input(w, name) else min(m, w.norm_tokens), k)
    out += weight_scales(w, name, "F", n, k)
    out += gathered_scales(w, name, "F", m, n, k)
    return [*out, gemm(name, "F", m, n, k, w.linear, variant=w.gemm_variant("F"))]


def linear_input_gradient(
    w: Work, name: str, m: float, n: float, k: float, *, cast_first: bool = False, cast_gradient: bool = True
) -> list[Operator]:
    """dx [m, k] = dy [m, n] W. In FP8 the weight is transposed and dy cast, in the order of the recipe."""
    out: list[Operator] = []
    if w.fp8:
        out.append(weight_transpose(f"{name}.weight_transpose", "I", n, k))
        if cast_gradient:
            out.insert(0 if cast_first else 1, cast(f"{name}.cast_gradient", "I", m, n, "token"))
        out.append(scale_transpose(f"{name}.scales", "I", m, n))
    if w.fp8_tensor:
        if w.separate_casts or not name.endswith(".gate_up"):  # else the activation's backward casts it
            out += one_scale_cast(w, f"{name}.cast_gradient", "I", m, n)
        if not _casts_input(w, name):  # Hopper's FP8 GEMMs contract along rows only, so x is transposed
            out.append(
                move(f"{name}.turn_input", "transpose", "I", m * k, m * k, variant="input", dtype="fp8")
            )
    if w.separate_casts or not name.endswith(".gate_up"):
        own = min(m, w.norm_tokens) if _row_parallel(name) else m  # cast before ranks gather it
        out += block_cast(w, f"{name}.cast_gradient", "I", own, n)
    out += weight_scales(w, name, "I", n, k)
    out += gathered_scales(w, name, "I", m, n, k)
    return [*out, gemm(f"{name}.dgrad", "I", m, k, n, w.linear, variant=w.gemm_variant("I"))]


def channel_casts(
    w: Work, name: str, m: float, n: float, k: float, *, gradient_first: bool = True
) -> list[Operator]:
    """Casts of dy [m, n] and x [m, k], the operands of a weight gradient, in FP8 by tiles; else none."""
    if not w.fp8:
        return []
    casts = [
        cast(f"{name}.gradient_cast_channel", "I", m, n, "channel"),
        cast(f"{name}.input_cast_channel", "I", m, k, "channel"),
    ]
    return casts if gradient_first else casts[::-1]


def linear_backward(
    w: Work, name: str, m: float, n: float, k: float, *, cast_first: bool = False
) -> list[Operator]:
    """Input gradient of a linear layer, then the casts for its weight gradient."""
    gradient = linear_input_gradient(w, name, m, n, k, cast_first=cast_first)
    return [*gradient, *channel_casts(w, name, m, n, k, gradient_first=False)]


def weight_gradient(w: Work, name: str, m: float, n: float, k: float) -> Operator:
    """dW [n, k] += dy^T x over m rows; the input gradient has cast and transposed the operands."""
    variant = w.gemm_variant("W")
    return gemm(f"{name}.wgrad", "W", n, k, m, w.linear, cls="wgrad_gemm", variant=variant)


def recomputed(operators: Iterable[Operator]) -> list[Operator]:
    """Return forward operators as run again in the backward: direction I, marked as recompute."""
    return [replace(op, name=f"{op.name}.recompute", direction="I", recompute=True) for op in operators]


def per_row_bytes(elements: float, fp8: bool) -> float:
    """Bytes of one dispatched row."""
    return row_bytes(elements, "fp8" if fp8 else "bf16")


# -- scales by blocks, as Transformer Engine runs MXFP8 and NVFP4 --------------------------------------
# Read in NVIDIA/TransformerEngine@d0067d0da: `csrc/quantizer.cpp`, `csrc/extensions/normalization.cpp`,
# `csrc/extensions/gemm.cpp`, `module/linear.py`, `module/grouped_linear.py` and `common/recipe/__init__.py`.
# One cast writes a tensor along its rows and along its columns, so that the GEMMs of forward and backward
# find their operands; tensor cores of Blackwell apply the scales and take every layout of FP8, so nothing is
# transposed. A norm writes BF16, which a kernel of its own casts (only cuDNN's norm could write MXFP8).
# Activations and gradients are cast with scales in the order of the GEMM, weights' scales are put into it
# before every GEMM. Weights are cast once a step.

ELEMENTS_OF_A_SCALE: dict[Blocks, float] = {"mx": 32.0, "nvfp4": 16.0}


def block_cast(
    w: Work, name: str, d: Direction, m: float, n: float, *, per_row: bool = False
) -> list[Operator]:
    """Cast of a BF16 tensor [m, n] along rows and columns (eq. C32); none without scales by blocks.

    NVFP4 has a scale of the whole tensor above those of the blocks, so a kernel reads the tensor first for
    its largest element, and for that of its columns behind the random Hadamard transform. The cast then
    transforms the columns of 16 elements and rounds gradients stochastically, both in registers.
    """
    if not w.blocks:
        return []
    dtype: Dtype = "fp8" if w.blocks == "mx" else "fp4"
    read, written = m * n * BF16, 2.0 * m * n * BLOCK_BYTES[w.blocks]
    op = move(name, "cast", d, read, written, variant=w.blocks, per_received_row=per_row, dtype=dtype)
    if w.blocks == "mx":
        return [op]
    return [replace(op, name=f"{name}.amax", bytes_written=0.0, variant="nvfp4_amax", launches=2), op]


def weight_scales(w: Work, name: str, d: Direction, n: float, k: float, groups: int = 1) -> list[Operator]:
    """Scales of a weight [n, k] put into the order in which a GEMM reads them; none without blocks."""
    if not w.blocks:
        return []
    size = groups * n * k / ELEMENTS_OF_A_SCALE[w.blocks]
    dtype: Dtype = "fp8" if w.blocks == "mx" else "fp4"
    return [move(f"{name}.weight_scales", "transpose", d, size, size, variant="block_scales", dtype=dtype)]


def gathered_scales(w: Work, name: str, d: Direction, m: float, n: float, k: float) -> list[Operator]:
    """Scales of gathered tensors put into the order of the GEMMs, which a cast before a gather cannot do.

    A column-parallel layer gathers its input [m, k] in both passes, a row-parallel one its gradient [m, n]
    along rows and columns. Those of the weight gradient are counted in I. Source: `optimize_for_gemm` in
    NVIDIA/TransformerEngine@v2.15 `pytorch/module/linear.py` and `layernorm_linear.py`.
    """
    row = _row_parallel(name)
    column = name in COLUMN_PARALLEL or name.endswith(".gate_up")
    if w.tp == 1 or not w.sequence_parallel or not (column or (row and d == "I")):
        return []
    times = 2 if row else 1
    out = weight_scales(w, name, d, times * m, n if row else k)
    return [replace(op, name=f"{name}.gathered_scales", launches=times) for op in out]


def weight_cast_bytes(blocks: Blocks) -> tuple[float, float]:
    """Bytes of a weight's element that its cast of every step (reads beyond the copy itself, writes)."""
    if blocks == "nvfp4":  # the copy is read for its largest element first
        return BF16, 2.0 * BLOCK_BYTES[blocks]
    return 0.0, 2.0 * BLOCK_BYTES[blocks]
