"""Measured serving rows: how they are read, what they run, and the statistics over them."""

from __future__ import annotations

from pathlib import Path

import pytest

from moesim.hwmodels.errors import InputError
from moesim.simulator.scoring.serving import (
    Interval,
    ScoredServing,
    board_of,
    closed_loop,
    error_score,
    predict,
    scenario_of,
)
from moesim.simulator.scoring.serving_published import (
    LoggedRates,
    figures,
    logged_runs,
    score_logged,
)
from moesim.simulator.scoring.serving_rows import (
    ServedPlan,
    ServingRow,
    run_of,
    same_conditions,
    serving_rows,
)
from moesim.simulator.serving.scheduler import StepBatch

HEADER = "source,system,model,hardware,conditions,metric,unit,value,where\n"
PLAN = "tp={tp}; pp=1; attn_dp={dp}; moe_tp={moe_tp}; moe_ep={moe_ep}; precision=fp8; measured=2026-03-25"


def row(**changes: object) -> ServingRow:
    """A shipped row's like: DeepSeek-R1 on eight H200 with SGLang."""
    fields: dict[str, object] = {
        "id": "x", "where": "x", "source": "x", "engine": "sglang", "release": "0.5.9",
        "model": "deepseek-ai/DeepSeek-R1", "hardware": "H200-SXM", "precision": "fp8", "day": "2026-03-25",
        "group": "", "isl": 1024, "osl": 1024, "concurrency": 4, "plan": ServedPlan(1, 8, 1, 1),
        "ttft_s": 0.2, "tpot_s": 0.01,
    }  # fmt: skip
    return ServingRow(**{**fields, **changes})


def table(
    tmp_path: Path, conditions: str, value: str = "10", unit: str = "ms", id_: str = "a"
) -> tuple[ServingRow, ...]:
    """Rows of a file with one line."""
    file = tmp_path / "rows.csv"
    line = f"s,trtllm 1.2,deepseek-ai/DeepSeek-R1,H200-SXM,{conditions},tpot,{unit},{value},id={id_}\n"
    file.write_text(HEADER + line)
    return serving_rows(file)


def test_metrics_of_a_run_are_joined_and_every_shipped_run_is_read_or_refused_for_its_reason() -> None:
    rows = serving_rows()
    assert len(rows) == 598
    assert all(row.ttft_s and row.tpot_s for row in rows)
    refused = set()
    for one in rows:
        try:
            run = run_of(one, rows)
        except InputError as error:
            refused.add(str(error))
        else:
            assert run.setup["tp"] * run.setup["dp"] % run.setup["ep"] == 0
    assert len(refused) == 1, refused
    assert "max-num-seqs" in refused.pop()


@pytest.mark.parametrize(
    ("degrees", "id_", "plan"),
    [
        ((8, 1, 8, 1), "a", ServedPlan(1, 8, 1, 1)),
        ((64, 1, 8, 8), "a_tp8_ep8_12", ServedPlan(1, 8, 1, 8)),  # TP times EP: one node
        ((1, 64, 8, 8), "a_tp8_ep8_12", ServedPlan(1, 1, 8, 8)),
        ((1, 8, 1, 8), "a", ServedPlan(1, 1, 8, 8)),
        ((4, 1, 2, 2), "a_tp4_epnone_4", ServedPlan(1, 4, 1, 2)),
    ],
)
def test_plans_of_one_engine(
    tmp_path: Path, degrees: tuple[int, int, int, int], id_: str, plan: ServedPlan
) -> None:
    names = dict(zip(("tp", "dp", "moe_tp", "moe_ep"), degrees, strict=True))
    conditions = "isl=1; osl=2; concurrency=3; agg; " + PLAN.format(**names)
    (one,) = table(tmp_path, conditions, id_=id_)
    assert (one.plan, one.tpot_s, one.concurrency, one.unread) == (plan, 0.01, 3, "")


@pytest.mark.parametrize(
    ("conditions", "value", "unit", "why"),
    [
        ("isl=1; osl=2; agg; " + PLAN.format(tp=1, dp=1, moe_tp=1, moe_ep=1), "10", "ms", "concurrency"),
        (
            "isl=1; osl=2; concurrency=3; " + PLAN.format(tp=2, dp=1, moe_tp=1, moe_ep=1),
            "10",
            "ms",
            "moe_tp=1",
        ),
        (
            "isl=1; osl=2; concurrency=3; " + PLAN.format(tp=1, dp=1, moe_tp=1, moe_ep=1),
            "-1",
            "ms",
            "value='-1'",
        ),
        ("isl=1; osl=2; concurrency=3; " + PLAN.format(tp=1, dp=1, moe_tp=1, moe_ep=1), "1", "h", "unit='h'"),
    ],
)
def test_rows_that_cannot_be_read_say_why(
    tmp_path: Path, conditions: str, value: str, unit: str, why: str
) -> None:
    (one,) = table(tmp_path, conditions, value, unit)
    with pytest.raises(InputError, match=why):
        run_of(one)


def test_a_table_without_its_columns_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text("model,value\nx,1\n")
    with pytest.raises(InputError, match="no column conditions"):
        serving_rows(file)


def test_rules_set_flags_and_drafts_follow_image_day_and_twin() -> None:
    mtp = row(engine="trtllm", hardware="B200-SXM", release="1.2.0rc6.post3", day="2026-02-05")
    assert run_of(mtp).setup["draft_tokens"] == 3
    assert run_of(mtp.model_copy(update={"plan": ServedPlan(1, 1, 8, 8)})).setup["draft_tokens"] == 1
    assert run_of(mtp.model_copy(update={"release": "1.2.0rc6.post2"})).setup["draft_tokens"] == 0
    assert "cache" not in run_of(row()).setup  # H200 scripts of SGLang leave keys and values in BF16
    assert run_of(mtp).setup["cache"] == "fp8"
    slow = row(hardware="B200-SXM", tpot_s=0.02)
    quick = slow.model_copy(update={"tpot_s": 0.01})
    assert same_conditions(slow) == same_conditions(quick)
    assert [run_of(one, (slow, quick)).setup["draft_tokens"] for one in (slow, quick)] == [0, 2]
    alone = run_of(slow)
    assert (alone.known, alone.setup["draft_tokens"]) == (False, 0)


def test_experts_and_attention_of_2025_11_02_follow_the_script() -> None:
    old = row(engine="trtllm", release="", day="2025-11-02", concurrency=64, isl=8192)
    assert [run_of(old).setup[name] for name in ("tp", "dp", "ep")] == [1, 8, 8]
    few = old.model_copy(update={"concurrency": 32})
    assert [run_of(few).setup[name] for name in ("tp", "dp", "ep")] == [8, 1, 8]
    assert run_of(few).setup["max_num_batched_tokens"] == (32 + 8192 + 127) // 64 * 64


def test_places_and_graphs_of_prefills_follow_the_script() -> None:
    mtp = row(engine="trtllm", hardware="B200-SXM", release="1.2.0rc6.post3", day="2026-02-05", concurrency=8)
    assert [run_of(mtp).setup[name] for name in ("max_num_seqs", "graph_prefill_tokens")] == [8, 65536]
    few = mtp.model_copy(update={"concurrency": 4})
    assert run_of(few).setup["max_num_seqs"] == 4
    assert "graph_prefill_tokens" not in run_of(few).setup
    apart = mtp.model_copy(update={"plan": ServedPlan(1, 1, 8, 8), "concurrency": 64})
    assert run_of(apart).setup["max_num_seqs"] == 8


def test_the_first_wave_of_a_server_that_nobody_warmed_up_may_be_late() -> None:
    warm, cold = (run_of(row(osl=64, isl=256, day=day)) for day in ("2026-01-21", "2026-01-20"))
    assert (warm.warmed, cold.warmed) == (True, False)
    early, late = (predict(run, {})[0]["ttft"] for run in (warm, cold))
    assert late.high == pytest.approx(early.high + 0.55)
    assert late[:2] == early[:2]


def test_the_load_is_a_closed_loop_of_ten_requests_a_slot() -> None:
    requests = closed_loop(run_of(row()))
    assert len(requests) == 40
    assert 819 <= requests.input_tokens.min() <= requests.input_tokens.max() <= 1024
    load = scenario_of(run_of(row())).serving.load  # type: ignore[union-attr]
    assert (load.arrivals, load.concurrency) == ("concurrency", 4)


def test_a_run_is_served_and_near_its_steady_state() -> None:
    run = run_of(row(osl=64, isl=256))
    found, steady = predict(run, {})
    for metric in ("tpot", "ttft"):
        assert found[metric].low <= found[metric].seconds <= found[metric].high
    assert found["tpot"].seconds == pytest.approx(steady["tpot"], rel=0.15)


def scored(plan: str, measured: float, predicted: float, **changes: object) -> ScoredServing:
    """A run of one family."""
    fields: dict[str, object] = {
        "id": plan, "title": plan, "model": "m", "hardware": "h", "engine": "e", "release": "",
        "precision": "fp8", "plan": plan, "gpus": 8, "isl": 1, "osl": 100, "concurrency": 4,
        "measured": {"ttft": 1.0, "tpot": measured},
        "predicted": {
            "ttft": Interval(1.1, 1.05, 1.2), "tpot": Interval(predicted, 0.9 * predicted, 1.1 * predicted),
        },
    }  # fmt: skip
    return ScoredServing(**{**fields, **changes})


def test_errors_coverage_and_order() -> None:
    runs = [scored("a", 1.0, 1.05), scored("b", 2.0, 1.0), scored("c", 3.0, 3.6)]
    errors = error_score("all", runs)
    assert errors.absolute["tpot"] == pytest.approx(0.2)
    assert errors.covered == {"tpot": pytest.approx(1 / 3), "ttft": 0.0}
    order = {score.name: score for score in board_of(runs).order}["TPOT, one load"]
    assert (order.pairs_right, order.pairs, order.regret_worst) == (2, 3, 1.0)
    unknown = board_of([*runs, scored("d", 1.0, 9.0, known=False)])
    assert unknown.totals[0].rows == 3


def test_logged_rates_are_spent_second_by_second() -> None:
    rates = LoggedRates([0.0, 0.0], [10.0, 30.0])
    pace = rates.pace(500_000_000, [StepBatch(20, 20, 0, 0, 0)])
    assert pace.first_ns == 1_000_000_000  # 5 tokens in the first second, 15 in the next half
    assert rates.pace(5_000_000_000, [StepBatch(30, 30, 0, 0, 0)]).first_ns == 1_000_000_000


def test_published_figures_have_deployments_and_the_logged_scheduler_is_close() -> None:
    assert all(one.batch.batch.prefill_tokens or one.batch.batch.decodes for one in figures())
    assert [len(run.requests["queued_ns"]) for run in logged_runs().runs] == [300, 300]
    found = {(one.name, one.what): one for one in score_logged(own=False)}
    error = found["Llama-3.1-8B, rates given", "median TTFT (s)"].error
    assert error is not None
    assert abs(error) < 0.1
