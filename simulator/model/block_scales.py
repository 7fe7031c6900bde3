"""Kernels around GEMMs whose operands have scales by blocks, as Transformer Engine runs MXFP8 and NVFP4.

Read in NVIDIA/TransformerEngine@d0067d0da: `csrc/quantizer.cpp`, `csrc/extensions/normalization.cpp`,
`csrc/extensions/gemm.cpp`, `module/linear.py`, `module/grouped_linear.py` and `common/recipe/__init__.py`.
One cast writes a tensor along its rows and along its columns, so that the GEMMs of forward and backward find
their operands; tensor cores of Blackwell apply the scales and take every layout of FP8, so nothing is
transposed. A norm writes BF16, which a kernel of its own casts (only cuDNN's norm could write MXFP8).
Activations and gradients are cast with scales in the order of the GEMM, weights' scales are put into it
before every GEMM. Weights are cast once a step.
"""

from __future__ import annotations

from dataclasses import replace

from moesim.simulator.model.operator import Direction, Dtype, Operator, Work
from moesim.simulator.model.precision import BLOCK_BYTES, Blocks

BF16 = 2.0
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
    cast = Operator(
        name,
        "cast",
        d,
        dtype,
        bytes_read=m * n * BF16,
        bytes_written=2.0 * m * n * BLOCK_BYTES[w.blocks],
        variant=w.blocks,
        per_received_row=per_row,
    )
    if w.blocks == "mx":
        return [cast]
    largest = replace(cast, name=f"{name}.amax", bytes_written=0.0, variant="nvfp4_amax", launches=2)
    return [largest, cast]


def weight_scales(w: Work, name: str, d: Direction, n: float, k: float, groups: int = 1) -> list[Operator]:
    """Scales of a weight [n, k] put into the order in which a GEMM reads them; none without blocks."""
    if not w.blocks:
        return []
    size = groups * n * k / ELEMENTS_OF_A_SCALE[w.blocks]
    dtype: Dtype = "fp8" if w.blocks == "mx" else "fp4"
    return [
        Operator(
            f"{name}.weight_scales",
            "transpose",
            d,
            dtype,
            bytes_read=size,
            bytes_written=size,
            variant="block_scales",
        )
    ]


def weight_cast_bytes(blocks: Blocks) -> tuple[float, float]:
    """Bytes of a weight's element that its cast of every step (reads beyond the copy itself, writes)."""
    if blocks == "nvfp4":  # the copy is read for its largest element first
        return BF16, 2.0 * BLOCK_BYTES[blocks]
    return 0.0, 2.0 * BLOCK_BYTES[blocks]
