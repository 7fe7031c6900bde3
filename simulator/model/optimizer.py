"""Operators of the optimizer."""

from __future__ import annotations

from moesim.simulator.model.block_scales import weight_cast_bytes
from moesim.simulator.model.operator import Operator
from moesim.simulator.model.precision import BYTES_PER_ELEMENT, Precision
from moesim.simulator.model.primitives import move


def optimizer_operators(
    owned_parameters: float, precision: Precision, local_parameters: float = 0.0
) -> tuple[Operator, ...]:
    """Gradient norm and AdamW update of the parameters that this GPU owns; only bytes are counted.

    `local_parameters` are those whose BF16 copy this GPU quantises after the update (0 in BF16).
    Eq. C9: bytes per owned parameter = gradient + 2 x (master + 2 moments) + written copy; parameters in the
    format of the masters are the masters, without a copy.
    """
    gradient = BYTES_PER_ELEMENT[precision.gradients]
    state = BYTES_PER_ELEMENT[precision.master_weights] + 2 * BYTES_PER_ELEMENT[precision.moments]
    copy = BYTES_PER_ELEMENT[precision.parameters]
    written_copy = copy if precision.parameters != precision.master_weights else 0.0
    n = owned_parameters
    out = [
        move("optimizer.gradient_norm", "optimizer", "W", n * gradient, 0.0, variant="norm"),
        move(
            "optimizer.adamw",
            "optimizer",
            "W",
            n * (gradient + state),
            n * (state + written_copy),
            variant="adamw",
        ),
    ]
    if precision.linear != "bf16" and local_parameters:
        more, written = weight_cast_bytes(precision.blocks) if precision.blocks else (0.0, 1.0)
        read = local_parameters * (copy + more)
        out.append(
            move(
                "optimizer.quantise",
                "optimizer",
                "W",
                read,
                local_parameters * written,
                variant="quantise",
                dtype=precision.linear,
            )
        )
    return tuple(out)
