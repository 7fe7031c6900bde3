"""Operators, model FLOPs, memory and rates of recurrent mixers (docs/model.md, eqs. C21 to C24)."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from lab import packed

from moesim.hwmodels.accelerator import load_accelerator
from moesim.hwmodels.calibration import load_profile
from moesim.hwmodels.errors import InputError
from moesim.simulator.cost.compute import SmContext, operator_seconds
from moesim.simulator.cost.rate_tables import RateTables
from moesim.simulator.memory.activations import cached_tensors
from moesim.simulator.model.attention import KDA, GatedDelta, Lightning, Mamba, Mamba2
from moesim.simulator.model.attention.recurrent import RecurrentMixer
from moesim.simulator.model.calls import calls_of
from moesim.simulator.model.catalogue import load_model
from moesim.simulator.model.operator import SCAN_CLASSES, Operator, Work
from moesim.simulator.model.operators import block_operators
from moesim.simulator.model.precision import PRECISIONS
from moesim.simulator.model.shape import ModelShape

MEASURED = "2026-11-22-h200-mixers.json"
BF16 = PRECISIONS["bf16"]
TOKENS = 4096
MIXERS: dict[str, RecurrentMixer] = {
    "gated_delta": GatedDelta(key_heads=16, value_heads=32, key_dim=128, value_dim=128),
    "kda": KDA(heads=32, head_dim=128),
    "mamba2": Mamba2(heads=64, head_dim=64, groups=8, state=128),
    "mamba": Mamba(inner=4096, state=16, dt_rank=128, inner_norms=True),
    "lightning": Lightning(heads=32, kv_heads=8, head_dim=128, qk_norm=True),
}
H200 = load_accelerator("h200-sxm")


def work(**more: Any) -> Work:
    sizes: dict[str, Any] = {
        "hidden": 2048, "fp8": False, "tokens": float(TOKENS), "sequence": TOKENS, "tp": 1, "ep": 1,
        "rows": 1.0, "received_tokens": 1.0, "recompute": "none",
    }  # fmt: skip
    return Work(**sizes | more)


def model(mixer: RecurrentMixer) -> ModelShape:
    dense = load_model("llama-3-8b")
    return dense.model_copy(update={"name": mixer.kind, "attention": mixer, "hidden": 2048, "n_layers": 8})


def operators(mixer: RecurrentMixer, **more: Any) -> list[Operator]:
    found = block_operators(model(mixer), "dense", BF16, tokens=TOKENS, sequence=TOKENS, **more)
    return [op for ops in found.values() for op in ops]


# -- FLOPs -------------------------------------------------------------------------------------------


def delta_rule_by_loops(heads: int, dk: int, dv: int, chunk: int) -> float:
    """Multiplications and additions of one chunk in the WY form, product by product."""
    flop = 0.0
    for _ in range(heads):
        for m, k, n in (
            (chunk, dk, chunk),  # keys with keys
            (chunk, chunk, dk),  # the inverse with the keys
            (chunk, chunk, dv),  # the inverse with the values
            (chunk, dk, dv),  # values that the state predicts
            (chunk, dk, dv),  # what the queries read from the state
            (chunk, dk, chunk),  # queries with keys
            (chunk, chunk, dv),  # these scores with the new values
            (dk, chunk, dv),  # the state's update
        ):
            flop += 2.0 * m * k * n
        for row in range(chunk):  # forward substitution of a unit triangle, for every column before the row
            flop += sum(2.0 * (row - column) for column in range(row))
    return flop / chunk


def test_flops_of_the_delta_rule_are_those_of_its_products() -> None:
    counted = MIXERS["gated_delta"].scan.flop
    assert counted == pytest.approx(delta_rule_by_loops(32, 128, 128, 64), rel=1e-3)
    assert MIXERS["kda"].scan.flop == counted, "a decay per channel changes no product"


def test_flops_of_the_other_scans_are_those_of_loops() -> None:
    heads, p, groups, n, q = 64, 64, 8, 128, 128
    products = [(groups, q, n, q), (heads, q, q, p), (heads, n, q, p), (heads, q, n, p)]
    flop = sum(2.0 * times * m * k * width for times, m, k, width in products)
    assert MIXERS["mamba2"].scan.flop == pytest.approx(flop / q)
    d, c = 128, 64
    flop = 32 * sum(2.0 * m * k * width for m, k, width in ((c, d, c), (c, c, d), (d, c, d), (c, d, d)))
    assert MIXERS["lightning"].scan.flop == pytest.approx(flop / c)
    assert MIXERS["mamba"].scan.flop == sum(7.0 for _ in range(4096) for _ in range(16))


@pytest.mark.parametrize("kind", MIXERS)
def test_gradients_of_the_projections_take_the_forward_twice(kind: str) -> None:
    def gemms(ops: list[Operator]) -> float:
        return sum(op.flop for op in ops if op.cls in ("gemm", "wgrad_gemm"))

    mixer, w = MIXERS[kind], work()
    backward = gemms(mixer.input_gradient(w)) + gemms(mixer.weight_gradient(w))
    assert backward == pytest.approx(2.0 * gemms(mixer.forward(w)))
    scans = [op for op in mixer.input_gradient(w) if op.cls == "scan_backward"]
    assert len(scans) == 1
    assert scans[0].flop - scans[0].uncounted_flop == pytest.approx(2.0 * TOKENS * mixer.scan.flop)


@pytest.mark.parametrize("kind", MIXERS)
def test_tensor_parallel_ranks_share_the_scan_and_heads_do_not_split(kind: str) -> None:
    mixer = MIXERS[kind]
    whole, half = (next(op for op in mixer.forward(work(tp=tp)) if op.cls == "scan_forward") for tp in (1, 2))
    assert half.flop == whole.flop / 2 and half.gemm is not None and whole.gemm is not None
    assert half.gemm.groups == whole.gemm.groups // 2
    with pytest.raises(InputError, match=r"parallel\.tp=3 does not divide"):
        operators(mixer, tp=3)


@pytest.mark.parametrize(
    ("kind", "sizes", "message"),
    [
        (GatedDelta, {"key_heads": 3, "value_heads": 8, "key_dim": 4, "value_dim": 4}, "key_heads=3"),
        (Mamba2, {"heads": 6, "head_dim": 4, "groups": 4, "state": 8}, "groups=4"),
        (Lightning, {"heads": 6, "kv_heads": 4, "head_dim": 8}, "kv_heads=4"),
    ],
)
def test_groups_of_heads_must_divide(kind: type[RecurrentMixer], sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=f"{message} does not divide"):
        kind.model_validate(sizes)


# -- memory ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "sizes"), [("gated_delta", [16, 32, 128, 128]), ("kda", [32, 128]), ("lightning", [32, 128])]
)
def test_saved_tensors_are_those_that_autograd_kept_on_the_gpu(kind: str, sizes: list[int]) -> None:
    rows = [row for run in packed.read(MEASURED)["runs"] for row in run["rows"]]
    row = next(r for r in rows if r["kind"] == kind and r["sizes"] == sizes)
    mixer = Lightning(heads=32, kv_heads=32, head_dim=128) if kind == "lightning" else MIXERS[kind]
    saved = [s for s in mixer.parts.saved if s.name != "inputs of activation and norms"]
    tokens = row["sequences"] * row["sequence"]
    parameters = 50_000  # decays and step biases in FP32, which autograd keeps as well
    assert 0 <= row["saved_bytes"] - tokens * sum(s.bytes_per_token for s in saved) < parameters


def test_recompute_of_the_core_frees_what_is_inside_the_scan_and_runs_it_again() -> None:
    for kind in ("gated_delta", "kda"):
        shape = model(MIXERS[kind])
        all_kept, fewer = (
            {t.name for t in cached_tensors(shape, "dense", BF16, policy)}
            for policy in ("none", ("core_attn",))
        )
        assert {s.name for s in MIXERS[kind].parts.saved if s.inside_scan} == all_kept - fewer
        again = [op for op in operators(MIXERS[kind], recompute=("core_attn",)) if op.recompute]
        assert [op.cls for op in again] == ["scan_forward"]
    assert not MIXERS["lightning"].modules, "its scan keeps its inputs only"
    assert not [
        op for op in operators(MIXERS["mamba2"], recompute=("core_attn",)) if op.cls == "scan_forward"
    ][1:]


def test_the_state_of_decoding_does_not_grow_with_the_tokens() -> None:
    for mixer in MIXERS.values():
        assert mixer.state_bytes(1, 2.0) == mixer.state_bytes(1_000_000, 2.0) > 0
    window = (2 * 16 * 128 + 32 * 128) * 3 * 2
    assert MIXERS["gated_delta"].state_bytes(1, 2.0) == 32 * 128 * 128 * 4 + window


# -- time --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "profile", ["h200-measured", "h200-8gpu", "generic-roofline", "b200-simumax", "h800-trace"]
)
@pytest.mark.parametrize("kind", MIXERS)
def test_scans_have_rates_of_their_own_or_a_prior_that_says_so(kind: str, profile: str) -> None:
    tables = RateTables(H200, load_profile(profile))
    hopper = profile not in ("generic-roofline", "b200-simumax")
    for op in (*MIXERS[kind].forward(work()), *MIXERS[kind].input_gradient(work())):
        if op.cls not in SCAN_CLASSES and op.cls != "conv":
            continue
        basis = tables.basis(op, overlapped=False)
        assert "attention_" not in basis.curve_id
        if hopper and op.cls == "conv":
            assert basis.curve_id == f"h200-mixers.conv.{op.variant}" and not basis.assumed
        elif hopper and kind != "mamba":
            assert basis.curve_id == f"h200-mixers.{op.cls.removeprefix('scan_')}.{kind}"
            assert not basis.assumed
        else:
            assert basis.curve_id.startswith("generic-priors.") and basis.assumed


def test_measured_scans_come_back_from_the_curves() -> None:
    """Shapes in the curves are priced as measured; `lab/profiles/mixer_curves.py` reports those left out."""
    profile = load_profile("h200-measured")
    rows = [row for run in packed.read(MEASURED)["runs"] for row in run["rows"]]
    row = next(r for r in rows if r["kind"] == "gated_delta" and r["sizes"][1] == 32)  # 1 x 8,192 tokens
    w = work(tokens=8192.0, sequence=8192)
    mixer = MIXERS["gated_delta"]
    for ops, key in ((mixer.forward(w), "forward_us"), (mixer.input_gradient(w), "backward_us")):
        op = next(op for op in ops if op.cls in SCAN_CLASSES)
        cost = operator_seconds(op, H200, profile, SmContext())
        assert cost.seconds * 1e6 == pytest.approx(row[key], rel=0.04)  # a mean of several lengths


def test_fewer_heads_side_by_side_take_longer_per_head() -> None:
    profile = load_profile("h200-measured")

    def seconds(tp: int) -> float:
        op = next(op for op in MIXERS["kda"].forward(work(tp=tp)) if op.cls == "scan_forward")
        return tp * operator_seconds(op, H200, profile, SmContext()).seconds

    times = [seconds(tp) for tp in (1, 2, 4)]
    assert all(few < many for few, many in pairwise(times))


def test_the_host_calls_scans_and_convolutions() -> None:
    for modules in ("torch", "transformer-engine"):
        for op in MIXERS["kda"].forward(work()):
            assert calls_of(op, modules), op.name
