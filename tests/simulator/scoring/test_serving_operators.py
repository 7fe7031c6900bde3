"""Scores of serving operators on a few rows of each table."""

from __future__ import annotations

import pytest

from moesim.simulator.scoring.serving_operators import (
    Case,
    exchange_cases,
    experts_and_mla,
    scores,
    sparse_case,
)

AIC = "ai-dynamo/aiconfigurator@095f58a51"
EXPERTS = (
    "moe_dtype=fp8_block; num_tokens={}; hidden=7168; inter=2048; topk=8; experts=256; ep={}; distribution={}"
)
MLA = "gemm=fp8_block; kv=fp8; heads=128; batch={}; isl_or_kv={}; step=0; tp=1"
DSA = "dsa_{}_module; gemm=fp8_block; kv=bfloat16; heads=128; batch={}; isl={}; past_kv={}; tp=1"
DEEPEP = "DeepEP {}; nodes={}; EP8; tokens/rank={}; hidden=7168; topk=8; experts=256; sms=20; notify_us=0.0"


def row(
    system: str, phase: str, conditions: str, value: float, model: str = "x/DeepSeek-V3.2"
) -> dict[str, str]:
    """A row of a table."""
    return {"source": AIC, "system": system, "model": model, "hardware": "H100-SXM", "phase": phase,
            "conditions": conditions, "metric": "dispatch_avg", "value": str(value)}  # fmt: skip


def test_public_rows_are_predicted_within_their_scatter() -> None:
    cases = list(
        experts_and_mla(
            [
                row("SGLang DeepEPMoE", "decode-op", EXPERTS.format(1024, 32, "uniform"), 0.1155),
                row("SGLang DeepEPMoE", "decode-op", EXPERTS.format(4096, 128, "power_law_1.02"), 0.1237),
                row("SGLang DeepEPMoE", "prefill-op", EXPERTS.format(65536, 32, "power_law_0.8"), 3.3857),
                row("SGLang MLA block (fa3)", "decode-op", MLA.format(32, 1024), 0.1246),
                row("SGLang MLA block (fa3)", "prefill-op", MLA.format(8, 4096), 19.1061),
            ]
        )
    )
    cases.append(
        sparse_case(row("SGLang (indexer)", "decode-op", DSA.format("generation", 32, 1, 4096), 0.1908))
    )
    for case in cases:
        assert case.predicted_s == pytest.approx(case.seconds, rel=0.12), case.family
    assert {case.eager for case in cases} == {"", "experts", "mla"}


def test_exchange_rows_are_predicted_and_halves_are_told_apart() -> None:
    rows = [
        row("DeepEP", "decode-comm", DEEPEP.format("ll", 1, 64), 24.574),
        row("DeepEP", "prefill-comm", DEEPEP.format("normal", 1, 4096), 492.2),
    ]
    cases = list(exchange_cases(rows))
    for case in cases:
        assert case.predicted_s == pytest.approx(case.seconds, rel=0.12)
    table = {
        score.family: score
        for score in scores([*cases, Case("alone", "h100-sxm", (2.0,), (), 2.0, given_s=1.0)])
    }
    assert table["alone"].left_out == 1 and table["alone"].left_out_median == 0.5
    assert table["all"].fitted == 2 and not cases[0].left_out
