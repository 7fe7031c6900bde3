"""Predicted times of sparse attention modules against the half of the measured rows that no fit saw."""

from __future__ import annotations

import csv
from collections import Counter
from msgspec.structs import replace

import pytest
from lab.scoring.attention_calls import AttentionCall, dsa_kernel
from lab.scoring.attention_modules import call_operators, call_seconds
from lab.scoring.frozen_predictions import DATA
from lab.scoring.sparse_attention import (
    PROFILE,
    MeasuredModule,
    measured_modules,
    median_error,
    score_modules,
)
from lab.scoring.sparse_attention_fit import OVERHEAD, fit_constants, hyper_points

from moesim.hwmodels.accelerator import load_accelerator
from moesim.hwmodels.calibration import load_profile
from moesim.hwmodels.errors import InputError
from moesim.simulator.model.attention import DSA, GQA, Compressed

H200, CONSTANTS = load_accelerator("h200-sxm"), load_profile(PROFILE)
KERNELS = {
    "sglang_dsa_dense_mha_fa3": {"sglang-fa3-dense-prefill"},
    "sglang_dsa_indexer_fa3": {"sglang-fa3-decode"},
    "sglang_dsa_indexer_flashmla_kv": {"sglang-flashmla-kv-prefill", "sglang-flashmla-kv-decode"},
    "sglang_dsa_indexer_flashmla_sparse": {"sglang-flashmla-sparse-prefill"},
    "sglang_dsa_skip_indexer_fa3": {"sglang-fa3-decode"},
    "sglang_dsa_skip_indexer_flashmla_kv": {"sglang-flashmla-kv-shared-prefill", "sglang-flashmla-kv-decode"},
    "sglang_dsa_skip_indexer_flashmla_sparse": {"sglang-flashmla-sparse-shared-prefill"},
    "FLASHMLA_SPARSE": {
        "vllm-flashmla-sparse-prefill", "vllm-flashmla-sparse-bf16-decode", "vllm-flashmla-sparse-fp8-decode",
    },
}  # fmt: skip
"""Kernels of ours behind each label of the source."""


def parts(kind: str) -> tuple[int, DSA | Compressed]:
    """Hidden size and attention of one measured module."""
    row = next(r for r in measured_modules() if kind in (r.model, r.module))
    hidden, attention = row.attention
    assert isinstance(attention, DSA | Compressed)
    return hidden, attention


def seconds(kind: str, phase: str, batch: int, new: int, past: int, **more: object) -> float:
    """Seconds of a call of one measured model's module."""
    hidden, attention = parts(kind)
    call = AttentionCall(phase=phase, batch=batch, new=new, past=past, **more)  # type: ignore[arg-type]
    return call_seconds(attention, hidden, call, H200, CONSTANTS).seconds


# -- the score ---------------------------------------------------------------------------------------


def test_the_left_out_half_is_predicted_within_12_percent_at_the_median() -> None:
    left_out = [s for s in score_modules() if not s.row.calibrates]
    assert len(left_out) == 169
    assert median_error(left_out) <= 0.12
    for family in {s.row.family for s in left_out}:
        own = [s for s in left_out if s.row.family == family]
        if "skip_indexer" not in family:  # measured times jump by a factor of three with the cached tokens
            assert median_error(own) <= 0.12, family
    modules = [s for s in left_out if not s.row.hyper]
    assert median_error(modules) <= 0.12, "without the easier hyper-connections"


def test_every_second_row_of_a_class_is_left_out() -> None:
    rows = measured_modules()
    assert len(rows) == 348 and sum(r.calibrates for r in rows) == 179
    seen: Counter[tuple[str, ...]] = Counter()
    for row in rows:
        key = (row.framework, row.kernel, row.model, row.module, row.phase, str(row.hidden))
        assert row.calibrates == (seen[key] % 2 == 0)
        seen[key] += 1
    file = DATA / "sparse-attention.csv"
    table = list(csv.DictReader(file.read_text(encoding="utf-8").splitlines()))
    assert len(table) == 348 and all("ai-dynamo/aiconfigurator@" in r["source"] for r in table)


def test_the_shipped_constants_are_those_of_the_calibration_half() -> None:
    by_use = {use: curve for curve in CONSTANTS.curves for use in curve.used_for}
    calibrating = [r for r in measured_modules() if r.calibrates]
    for fitted in fit_constants(calibrating, H200):
        curve = by_use[fitted.use]
        expected = fitted.value if fitted.use.startswith(OVERHEAD) else 1.0 / fitted.value
        assert curve.curve.ys[0] == pytest.approx(expected, rel=2e-3, abs=1e-8), fitted.use
        assert expected <= 1.0, "no kernel is faster than its roofline"
    points = hyper_points(calibrating, "mhc_post")
    shipped = by_use["elementwise/hyper_post"].curve.points
    assert [x for x, _ in shipped] == pytest.approx([x for x, _ in points], rel=1e-3)


def test_a_left_out_row_cannot_reach_the_fit() -> None:
    with pytest.raises(AssertionError, match="left out"):
        fit_constants(measured_modules(), H200)
    changed = [r if r.calibrates else replace(r, seconds=1.0) for r in measured_modules()]
    kept = [r for r in changed if r.calibrates]
    again = fit_constants(kept, H200)
    assert again == fit_constants([r for r in measured_modules() if r.calibrates], H200)


@pytest.mark.parametrize(
    "row", [r for r in measured_modules() if r.kernel in KERNELS], ids=lambda r: r.source
)
def test_the_rules_choose_the_kernel_that_was_measured(row: MeasuredModule) -> None:
    _, attention = row.attention
    assert isinstance(attention, DSA)
    assert dsa_kernel(attention, row.call) in KERNELS[row.kernel]


# -- behaviour away from the rows --------------------------------------------------------------------

KINDS = ["DeepSeek-V3.2", "GLM-5", "dsv4_csa_context_module", "dsv4_hca_context_module"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kv", ["bf16", "fp8"])
def test_more_work_never_takes_less_time(kind: str, kv: str) -> None:
    for phase, new in (("prefill", 4096), ("decode", 1)):
        pasts = [seconds(kind, phase, 4, new, past, kv=kv) for past in (0, 1000, 4096, 32768, 500_000)]
        batches = [seconds(kind, phase, b, new, 8192, kv=kv) for b in (1, 3, 8, 64, 512)]
        ranks = [seconds(kind, phase, 64, new, 8192, kv=kv, tp=tp) for tp in (8, 4, 2, 1)]
        for times in (pasts, batches, ranks):
            assert times == sorted(times), (phase, times)
    lengths = [seconds(kind, "prefill", 1, new, 0, kv=kv) for new in (1, 64, 1024, 2048, 8192, 65536)]
    assert lengths == sorted(lengths)


def test_long_calls_approach_a_constant_time_per_token_and_short_ones_the_host() -> None:
    per_token = [seconds("DeepSeek-V3.2", "prefill", b, 4096, 0) / b for b in (16, 256, 4096)]
    assert per_token[1] == pytest.approx(per_token[2], rel=0.01)
    host = seconds("DeepSeek-V3.2", "prefill", 1, 1, 0, stack="vllm")
    assert (
        host == seconds("DeepSeek-V3.2", "prefill", 1, 8, 0, stack="vllm") == pytest.approx(1.6e-3, rel=0.1)
    )


def test_operators_of_a_call_count_its_work() -> None:
    hidden, attention = parts("DeepSeek-V3.2")
    call = AttentionCall(phase="prefill", batch=2, new=4096, past=1024, stack="vllm")
    ops = {op.name: op for op in call_operators(attention, hidden, call)}
    positions = range(1025, 5121)
    assert ops["attention"].flop == pytest.approx(
        2 * 2 * 128 * 1088 * sum(min(i, 2048) for i in positions), rel=1e-4
    )
    assert ops["indexer.scores"].flop == pytest.approx(2 * 2 * 64 * 128 * sum(positions))
    assert ops["o_proj"].flop == 2 * 8192 * 7168 * 16384
    weights = sum(
        op.gemm.n * op.gemm.k * op.gemm.groups for op in ops.values() if op.cls == "gemm" and op.gemm
    )
    assert weights == attention.parameters(hidden) - 2 * 128  # the layer norm of the indexer's key
    eight = {op.name: op for op in call_operators(attention, hidden, replace(call, tp=8))}
    assert eight["attention"].flop == ops["attention"].flop / 2, "16 heads are padded to 64"
    assert eight["o_proj"].flop == ops["o_proj"].flop / 8
    assert eight["indexer.scores"] == ops["indexer.scores"]


def test_decode_reads_the_cache_of_every_sequence() -> None:
    hidden, attention = parts("DeepSeek-V3.2")
    call = AttentionCall(phase="decode", batch=32, new=1, past=100_000, kv="fp8")
    ops = {op.name: op for op in call_operators(attention, hidden, call)}
    assert ops["attention"].bytes_read == pytest.approx(32 * (2048 * 656 + 128 * 576 * 2))
    assert ops["indexer.scores"].bytes_read == pytest.approx(32 * (100_001 * 132 + 64 * 128))


def test_calls_that_cannot_be_priced_are_refused_in_words() -> None:
    hidden, attention = parts("DeepSeek-V3.2")
    call = AttentionCall(phase="decode", batch=1, new=1, past=10)
    with pytest.raises(InputError, match="tp=3 does not divide heads=128"):
        call_seconds(attention, hidden, replace(call, tp=3), H200, CONSTANTS)
    with pytest.raises(InputError, match="'gqa' has no inference module"):
        call_seconds(GQA(heads=8, kv_heads=8, head_dim=64), 512, call, H200, CONSTANTS)
    with pytest.raises(InputError, match="module overhead"):
        call_seconds(attention, hidden, call, H200, load_profile("generic-priors"))
    with pytest.raises(InputError, match="batch=0 is below 1"):
        replace(call, batch=0)
    with pytest.raises(InputError, match="give a smaller batch"):
        replace(call, past=1 << 41)
