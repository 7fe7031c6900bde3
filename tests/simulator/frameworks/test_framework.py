"""What a framework's own kernels and copies add to a block, counted by hand."""

from __future__ import annotations

from math import fsum
from statistics import median
from typing import Any

import numpy as np
import pytest

from moesim.hwmodels.calibration import load_profile
from moesim.simulator.cost.pricing import Pricer
from moesim.simulator.frameworks.operators import apply_framework
from moesim.simulator.frameworks.software import Software
from moesim.simulator.layout.job import resolve
from moesim.simulator.model.attention import GQA
from moesim.simulator.model.catalogue import load_model
from moesim.simulator.model.operator import Operator
from moesim.simulator.model.operators import block_operators
from moesim.simulator.model.precision import Precision
from moesim.simulator.model.shape import ModelShape
from moesim.simulator.scenario import load_scenario

LLAMA = load_model("llama-3-8b")
RECIPE = Precision(linear="bf16", loss="fp32")
PARAMETERS = 1e6


def phases(kind: str = "dense", shape: ModelShape = LLAMA) -> dict[str, tuple[Operator, ...]]:
    found = block_operators(shape, kind, RECIPE, tokens=4096, sequence=4096)
    return {str(phase): ops for phase, ops in found.items()}


def run(software: Software, kind: str = "dense", zero: int = 1) -> dict[str, tuple[Operator, ...]]:
    found = apply_framework(phases(kind), software, RECIPE, zero, PARAMETERS, PARAMETERS)  # type: ignore[arg-type]
    return {str(phase): ops for phase, ops in found.items()}


def moved(operators: dict[str, tuple[Operator, ...]]) -> float:
    return fsum(op.bytes_read + op.bytes_written for ops in operators.values() for op in ops)


@pytest.mark.parametrize(("how", "added"), [("written", 0.0), ("added", 6.0), ("added-fp32", 18.0)])
def test_gradients_that_a_product_writes_are_added_by_other_kernels(how: str, added: float) -> None:
    weights = fsum(op.accumulated_bytes for ops in phases().values() for op in ops) / 8.0
    assert weights == pytest.approx(4096 * (6144 + 4096 + 3 * 14336))  # q, k, v and o, gate, up and down
    found = run(Software(weight_gradients=how))
    assert all(op.accumulated_bytes == 0.0 for ops in found.values() for op in ops)
    # 8 B a weight of reading and writing FP32 become 2 B of writing BF16.
    assert moved(found) - moved(phases()) == pytest.approx(-6.0 * weights + added * PARAMETERS)


def test_flat_parameters_join_and_cast_gradients_of_sharded_blocks_only() -> None:
    assert moved(run(Software(flat_parameters=True), zero=3)) - moved(phases()) == pytest.approx(10e6)
    assert run(Software(flat_parameters=True)) == phases()


def test_a_chained_loss_reads_the_logits_as_often_as_its_kernels() -> None:
    logits = 4096 * LLAMA.vocab * 4.0
    (fused,) = [op for op in phases("head")["mlp F"] if op.name == "loss"]
    (chain,) = [op for op in run(Software(loss="chain"), "head")["mlp F"] if op.name == "loss"]
    assert fused.bytes_read == pytest.approx(2 * logits)
    assert chain.bytes_read == pytest.approx(8 * logits)
    assert chain.launches == 5


def test_models_without_rotary_embedding_run_none() -> None:
    attention = LLAMA.attention
    assert isinstance(attention, GQA)
    plain = LLAMA.model_copy(update={"attention": attention.model_copy(update={"rotary": False})})
    assert {op.cls for ops in phases(shape=plain).values() for op in ops} == {
        op.cls for ops in phases().values() for op in ops
    } - {"rope"}


def test_a_compiled_loss_makes_half_the_passes_of_the_chain() -> None:
    logits = 4096 * LLAMA.vocab * 4.0
    (compiled,) = [op for op in run(Software(loss="compiled"), "head")["mlp F"] if op.name == "loss"]
    assert compiled.bytes_read == pytest.approx(4 * logits)
    assert compiled.launches == 2


def test_gradients_in_16_bits_are_added_into_half_the_bytes() -> None:
    weights = fsum(op.accumulated_bytes for ops in phases().values() for op in ops) / 8.0
    recipe = RECIPE.model_copy(update={"gradients": "bf16"})
    found = apply_framework(phases(), Software(), recipe, 1, PARAMETERS, PARAMETERS)  # type: ignore[arg-type]
    narrow = {str(phase): ops for phase, ops in found.items()}
    assert fsum(op.accumulated_bytes for ops in narrow.values() for op in ops) == pytest.approx(4.0 * weights)
    assert moved(phases()) - moved(narrow) == pytest.approx(4.0 * weights)


def test_groups_of_one_member_are_cast_copied_packed_and_divided() -> None:
    recipe = RECIPE.model_copy(update={"parameters": "fp32", "gradient_reduce": "fp32"})
    plain = phases()
    alone = Software(parameters_copied=True, single_groups_copied=True)
    found = apply_framework(plain, alone, recipe, 3, PARAMETERS, 0.0)  # type: ignore[arg-type]
    # Cast 6 B and copy 4 B before each pass; pack 6 B, divide 8 B and copy 8 B of gradients.
    assert moved({str(k): v for k, v in found.items()}) - moved(plain) == pytest.approx(42e6)
    shared = apply_framework(plain, alone, recipe, 3, PARAMETERS, PARAMETERS)  # type: ignore[arg-type]
    assert not any("single" in op.name for ops in shared.values() for op in ops)


def test_an_eager_loss_moves_more_than_a_fused_one_in_both_directions() -> None:
    def bytes_of(loss: str, phase: str) -> float:
        ops = run(Software.model_validate({"loss": loss}), "head")[phase]
        (op,) = [op for op in ops if op.cls == "loss"]
        assert (op.variant.startswith(loss)) == (loss in ("eager", "chain"))
        return op.bytes_read + op.bytes_written

    assert bytes_of("eager", "mlp F") == pytest.approx(1.5 * bytes_of("fused", "mlp F"), rel=1e-3)
    assert bytes_of("eager", "mlp I") == pytest.approx(2.0 * bytes_of("fused", "mlp I"))
    assert bytes_of("chain", "mlp I") == bytes_of("fused", "mlp I")


# -- torchtitan's code, model by model -----------------------------------------------------------------

EAGER = Software(kernels="eager", weight_gradients="written", gradient_sums=True)


def eager_of(name: str, kind: str, microbatches: int = 1) -> dict[str, Operator]:
    shape, tokens = load_model(name), 4096
    rows = tokens * float(shape.moe.top_k) if shape.moe else 0.0
    found = block_operators(shape, kind, RECIPE, tokens=tokens, sequence=tokens, received_rows=rows)
    adapted = apply_framework(found, EAGER, RECIPE, 0, PARAMETERS, 0.0, microbatches=microbatches)
    return {op.name: op for ops in adapted.values() for op in ops}


def test_rope_of_qwen3_rotates_halves_and_that_of_llama_multiplies_complex_numbers() -> None:
    qwen, llama = eager_of("qwen3-30b-a3b", "moe"), eager_of("llama-3-8b", "dense")
    elements = 4096 * 32 * 128
    for name, size, kernels, variant in (
        ("rope_q", 20, 5, "eager_halves"), ("rope_q.backward", 30, 9, "eager_halves_backward"),
    ):  # fmt: skip
        assert qwen[name].bytes_read + qwen[name].bytes_written == pytest.approx(size * elements)
        assert (qwen[name].launches, qwen[name].variant) == (kernels, variant)
    assert {llama[name].variant for name in ("rope_q", "rope_q.backward")} == {"eager"}


def test_heads_of_mla_are_joined_by_the_kernels_that_torchtitan_runs() -> None:
    found = eager_of("deepseek-v2-lite", "moe")
    token, heads = 4096 * 2.0, 16
    joined = {name: found[name].bytes_written for name in ("k.cat", "q.cat", "kv_up.cat", "q.cat.backward")}
    assert joined == {
        "k.cat": token * heads * 192, "q.cat": token * heads * 192,
        "kv_up.cat": token * heads * 256, "q.cat.backward": token * heads * 192,
    }  # fmt: skip
    assert found["k.cat"].bytes_read == token * (heads * 128 + 64)  # the rotated part is one for all heads
    assert found["kv_latent.join"].bytes_written == token * (512 + 64 + 512)  # joined, and contiguous
    assert not {"k_nope_pack", "k_rope_broadcast", "v_unpack", "residual_scale"} & found.keys()
    assert found["shared.add"].bytes_read == 2 * token * 2048


def test_norms_over_heads_and_weight_gradients_of_all_experts_are_kernels_of_their_own() -> None:
    found = eager_of("qwen3-30b-a3b", "moe")
    variants = [
        found[name].variant for name in ("qk_norm", "qk_norm.backward", "attn_norm", "ffn_norm.backward")
    ]
    assert variants == ["eager_head_forward", "eager_head_backward", "eager_forward_add", "eager_backward"]
    assert found["experts.down.wgrad"].launches == 1


@pytest.mark.parametrize(("microbatches", "share"), [(1, 0.0), (4, 0.75)])
def test_autograd_adds_the_gradients_of_all_micro_batches_but_the_first(
    microbatches: int, share: float
) -> None:
    found = eager_of("llama-3-8b", "dense", microbatches=microbatches).get("gradients.accumulate")
    assert (found.bytes_read + found.bytes_written if found else 0.0) == pytest.approx(
        6.0 * PARAMETERS * share
    )


def test_logits_of_the_eager_loss_are_in_fp32_whatever_the_recipe_says() -> None:
    plain = load_scenario("llama-3-70b-64xh100", ["precision=bf16"])
    assert plain.recipe.loss == "bf16"
    assert plain.overridden("software.loss=eager").recipe == plain.recipe.model_copy(update={"loss": "fp32"})


@pytest.mark.parametrize("name", ["h100-from-h200", "h100-products", "h100-layers"])
def test_the_profiles_of_h100_hold_eager_operators_that_were_measured_on_one(name: str) -> None:
    profile = load_profile(name)
    for use in (
        "permute/eager_reduce",
        "rope/eager_halves",
        "norm/eager_head_forward",
        "copy/widen",
        "optimizer/adamw",
    ):
        curve = next(curve for curve in profile.curves if use in curve.used_for)
        assert (curve.kind, curve.conditions.device) == ("measured", "NVIDIA H100 80GB HBM3"), use


MIXTRAL = load_model("mixtral-8x7b")


def rows(kernels: str, one_copy: bool = False, **more: object) -> dict[str, float]:
    """Bytes by kernel of the rows of experts, over the elements of the rows."""
    software = Software.model_validate({"kernels": kernels, **more})
    plain = block_operators(MIXTRAL, "moe", RECIPE, tokens=4096, sequence=4096, received_rows=8192.0)
    found = apply_framework(plain, software, RECIPE, 3, 0.0, 0.0, own_kernels=one_copy)
    elements = 4096 * 2 * MIXTRAL.hidden
    ops = [op for part in found.values() for op in part if op.cls == "permute"]
    return {op.name: (op.bytes_read + op.bytes_written) / elements for op in ops}


def test_rows_of_experts_are_eager_where_the_rest_of_a_layer_is_compiled() -> None:
    """torchtitan compiles the grouped GEMMs and their activation, but not what permutes and sums rows."""
    compiled: dict[str, Any] = {"compiled_blocks": True, "expert_rows": "eager"}
    eager, mixed, fused = rows("eager"), rows("fused", **compiled), rows("fused", compiled_blocks=True)
    names = [f"experts.{what}" for what in ("expand", "reduce", "expand_gradient", "reduce_gradient")]
    assert [mixed[n] for n in names] == [eager[n] for n in names] == pytest.approx([12.0, 20.0, 18.0, 16.0])
    assert all(fused[n] < 8.0 for n in names)
    assert [rows("fused", one_copy=True, **compiled)[n] for n in names] == pytest.approx(
        [4.0, 12.0, 12.0, 8.0]
    )


def test_eager_kernels_on_blackwell_follow_from_two_memories_beside_the_same_sms() -> None:
    """1 / rate = s / SMs + m / bandwidth, solved on H100 and H200 (eq. H4).

    Permutations keep the sessions that their priors name: since decision 0080 both cards price them by
    choices, with padding apart, which Blackwell's priors contain. H100's rotation is of another piece since
    decision 0081.
    """
    apart = {"permute/eager_expand", "permute/eager_expand_gradient", "permute/eager_reduce"}
    apart |= {"permute/eager_reduce_gradient", "rope/eager_halves_backward"}
    cards = [
        {use: c for c in load_profile(n).curves for use in c.used_for} for n in ("h200-eager", "h100-eager")
    ]
    priors = {
        p.used_for[0]: p for p in load_profile("b200-layers").priors if p.id.startswith("blackwell-eager")
    }
    assert set(priors) == (set(cards[0]) & set(cards[1])) - {"permute/eager_padding"}
    for use, prior in priors.items():
        if use in apart:
            assert prior.low <= prior.fraction <= prior.high
            continue
        both = [[q[:2] for q in card[use].points] for card in cards]
        least, most = both[1][0][0], both[1][-1][0]
        sizes = [x for x, _ in both[0] if least <= x <= most]
        sizes = [x for x in sizes if x >= median(sizes)]
        h200, h100 = (median(np.interp(sizes, *zip(*points, strict=True))) for points in both)
        memory = min(max((1 / h100 - 1 / h200) / (1 / 3350 - 1 / 4800), 0.0), 4800 / h200)
        rate = 1 / ((1 / h200 - memory / 4800) * 132 / 148 + memory / 8000)
        assert prior.fraction == pytest.approx(rate / 8000, rel=0.01), use
        assert prior.low <= prior.fraction <= prior.high


def test_only_pytorchs_grouped_gemms_read_its_rates() -> None:
    """`h100-gemm` has them as a variant: eager torchtitan reads it, Megatron's grouped GEMMs do not."""
    keys = ("cluster.accelerator=h100-sxm", "profile=h100-from-h200", "precision=bf16", "parallel.ep=4")
    scenario = load_scenario("mixtral-8x7b-64xh100", keys)
    used = {}
    for framework in ("torchtitan-0.2", "megatron-core-0.17"):
        own = scenario.overridden(f"software.framework={framework}")
        pricer = Pricer(resolve(own))
        operators, costs = pricer.operators("moe")["mlp F"], pricer.operator_costs("moe", "mlp F", "alone")
        pairs = zip(operators, costs, strict=True)
        used[framework] = {
            cost.curve_ids[0] for op, cost in pairs if op.gemm is not None and op.gemm.groups > 1
        }
    assert used["torchtitan-0.2"] == {"h100-gemm.grouped_gemm_bf16.grouped_mm"}
    assert used["megatron-core-0.17"] and not any("grouped_mm" in name for name in used["megatron-core-0.17"])
