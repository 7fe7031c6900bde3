"""Operators of the optimizer."""

from __future__ import annotations

from moesim.simulator.model.operator import Operator
from moesim.simulator.model.precision import BYTES_PER_ELEMENT, Precision
from moesim.simulator.model.primitives import move
from moesim.simulator.model.software import Software


def optimizer_operators(
    owned_parameters: float, precision: Precision, local_parameters: float = 0.0
) -> tuple[Operator, ...]:
    """Gradient norm and AdamW update of the parameters that this GPU owns; only bytes are counted.

    `local_parameters` are those whose BF16 copy this GPU quantises to FP8 after the update (0 without FP8).
    Eq. C9: bytes per owned parameter = gradient + 2 x (master + 2 moments) + written copy.
    """
    gradient = BYTES_PER_ELEMENT[precision.gradients]
    state = BYTES_PER_ELEMENT[precision.master_weights] + 2 * BYTES_PER_ELEMENT[precision.moments]
    copy = BYTES_PER_ELEMENT[precision.parameters]
    n = owned_parameters
    out = [
        move("optimizer.gradient_norm", "optimizer", "W", n * gradient, 0.0, variant="norm"),
        move(
            "optimizer.adamw", "optimizer", "W", n * (gradient + state), n * (state + copy), variant="update"
        ),
    ]
    if precision.linear == "fp8" and local_parameters:
        read = local_parameters * copy
        out.append(
            move(
                "optimizer.quantise",
                "optimizer",
                "W",
                read,
                local_parameters,
                variant="quantise",
                dtype="fp8",
            )
        )
    return tuple(out)


def gradient_passes(parameters: float, precision: Precision, software: Software) -> tuple[Operator, ...]:
    """Passes over the gradients of all `parameters` that a GPU holds, once a step (docs/model.md, eq. C13).

    Buffers are cleared only where products are added into them.
    """
    size = parameters * BYTES_PER_ELEMENT[precision.gradients]
    moved = {"zero": (0.0, size), "check": (size, 0.0), "scale": (size, size)}
    names = [n for n in software.gradient_passes if n != "zero" or software.weight_gradients != "written"]
    variants = {"zero": "update", "check": "norm", "scale": "update"}
    return tuple(
        move(f"optimizer.gradient_{name}", "optimizer", "W", *moved[name], variant=variants[name])
        for name in names
    )
