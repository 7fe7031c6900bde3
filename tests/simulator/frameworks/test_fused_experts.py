"""A fused grouped MLP leaves the grouped GEMMs and the kernels outside of them, and recomputed ones."""

from __future__ import annotations

import pytest

import moesim
from moesim.hwmodels.errors import InputError
from moesim.simulator.frameworks.operators import apply_framework
from moesim.simulator.frameworks.software import Software
from moesim.simulator.model.catalogue import load_model
from moesim.simulator.model.operators import block_operators
from moesim.simulator.model.precision import PRECISIONS, Precision

FUSED = Software(expert_kernels="fused")


@pytest.mark.parametrize("scaling", ["tile", "tensor"])
def test_only_kernels_between_the_grouped_gemms_go(scaling: str) -> None:
    recipe = Precision.model_validate({**PRECISIONS["fp8"].model_dump(), "scaling": scaling})
    operators = block_operators(
        load_model("deepseek-v3"), "moe", recipe, tokens=4096, sequence=4096, tp=1, cp=1, ep=64,
        received_rows=32768.0, recompute="selective",
    )  # fmt: skip
    fused = apply_framework(operators, FUSED, recipe, 1, 0.0, 0.0)
    gone = {op.name for ops in operators.values() for op in ops} - {
        op.name for ops in fused.values() for op in ops
    }
    assert "experts.swiglu" in gone
    assert "experts.gate_up.cast_gradient" in gone
    assert all(name.startswith("experts.") for name in gone)
    for phase, ops in operators.items():
        gemms = [op for op in ops if op.gemm is not None]
        assert [op for op in fused[phase] if op.gemm is not None] == gemms
        assert [op for op in fused[phase] if op.recompute] == [op for op in ops if op.recompute]


def test_it_is_refused_where_no_kernel_was_written() -> None:
    for overrides in (("precision=bf16", "cluster=b200-1024", "profile=b200-layers"), ("precision=fp8",)):
        with pytest.raises(InputError) as caught:
            moesim.check("deepseek-v3-2048xh800", *overrides, "software.expert_kernels=fused")
        assert (caught.value.key, caught.value.nearest) == ("software.expert_kernels", ("separate",))
