"""The order of plans as a score, and tables of measurements that a user brings."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from moesim.cli import main
from moesim.hwmodels.calibration import TraceOrigin, load_profile
from moesim.hwmodels.errors import InputError
from moesim.kernels.export import write_profile
from moesim.simulator.scoring import file_records
from moesim.simulator.scoring.case_rows import score_cases
from moesim.simulator.scoring.dispatcher_rows import (
    ScoredDispatcherRow,
    dispatcher_order,
    dispatcher_rows,
    left_out,
    scenario_of,
)
from moesim.simulator.scoring.order import TimedPlan, family_order, order_score


def _plans(measured: str, predicted: str, family: str = "f") -> list[TimedPlan]:
    steps = zip(map(float, measured.split()), map(float, predicted.split()), strict=True)
    return [TimedPlan(f"{family}{n}", family, n, *both) for n, both in enumerate(steps)]


def test_pairs_pick_and_regret_are_counted_by_hand() -> None:
    # 10.0 and 10.4 differ by 4 %: no pair. The pick is the second plan of five, 30 % behind the fastest.
    order = family_order(_plans("10 13 10.4 20 12", "4 1 5 9 2"))
    assert order is not None
    assert (order.plans, order.pairs) == (5, 9)
    assert order.pairs_right == 4  # the four pairs with the plan of 20 s
    assert (order.picked, order.best) == ("f1", "f0")
    assert order.regret == pytest.approx(0.3)


def test_right_predictions_have_no_regret_and_equal_ones_are_not_right() -> None:
    right = order_score("s", [*_plans("1 2 3", "2 3 4"), *_plans("5 6", "1 2", "g")])
    assert right is not None and (right.pairs_right, right.pairs, right.best_picked) == (4, 4, 2)
    assert right.regret_worst == 0.0
    equal = family_order(_plans("1 2", "3 3"))
    assert equal is not None and equal.pairs_right == 0


def test_pairs_called_tied_are_counted_apart() -> None:
    drawn = tuple(np.linspace(0.9, 1.1, 101))
    steps = [(1.0, 1.0), (1.2, 0.99), (1.5, 1.4)]
    plans = [TimedPlan(str(n), "f", n, *step, drawn) for n, step in enumerate(steps)]
    order = family_order(plans)
    # The first two are predicted 1 % apart, in the wrong order; the third is behind both.
    assert order is not None and (order.pairs, order.pairs_right) == (3, 2)
    assert (order.pairs_tied, order.tied_right) == (1, 0)


def test_repeats_of_a_plan_count_once_and_a_family_without_a_pair_is_none() -> None:
    twice = [TimedPlan("a", "f", 1, 10.0, 3.0), TimedPlan("b", "f", 1, 12.0, 3.0)]
    assert family_order(twice) is None
    assert order_score("s", _plans("10 10.2", "1 2")) is None


def test_a_row_over_efa_runs_on_the_release_that_it_names() -> None:
    rows = {row.id: row for row in dispatcher_rows()}
    assert len(rows) == 23
    one = scenario_of(rows["q235-64-ep16-nccl-alltoall-mb4-on"])
    assert one.software.framework == "megatron-bridge-0.4" and one.software.loss == "fused"
    assert one.model != "qwen3-235b-a22b" and one.schedule == "interleaved-1f1b-overlapped"
    assert one.machine.node.name == "aws-p6-b300" and one.machine.network.name == "efa-v4-400g"
    assert not left_out(rows["q235-64-ep16-nccl-alltoall-mb4-on"])
    assert "recompute" in left_out(rows["dsv3-256-deepep-uccl-mb4-off"])[0]
    for key, value, said in (
        ("software", "x", "no trainer release for 'x'"), ("dp", 3, "tp x pp x dp = 96"),
        ("routing", "real", "routing 'real'"), ("gpus_per_node", 4, "nodes of 4 GPUs"),
        ("fabric", "EFA 8 x 400 Gb/s a node", "no node is known for H100-SXM, EFA 8"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=said):
            scenario_of(rows["q30-64-ep16-nccl-alltoall-mb4-off"].model_copy(update={key: value}))


def test_a_row_over_efa_runs_what_its_recipe_sets_and_its_script_leaves() -> None:
    """Layers of every stage, recompute and formats of Megatron-Bridge 0.4.2; none for tables of others."""
    rows = {row.id: row for row in dispatcher_rows()}
    small = rows["q30-64-ep16-nccl-alltoall-mb4-off"]
    assert scenario_of(small).recompute == "full" and "its recipe turns on" in left_out(small)[0]
    other = small.model_copy(update={"campaign": ""})
    assert scenario_of(other).recompute == "none" and not left_out(other)
    large, paired = (scenario_of(rows[f"q235-64-ep16-nccl-alltoall-mb4-{x}"]) for x in ("off", "on"))
    assert large.recompute == ("core_attn",) and large.stages.layers == (23, 24, 24, 23)
    assert paired.stages.layers == (12,) * 8 and not paired.communication.delay_weight_gradients
    deep = scenario_of(rows["dsv3-256-deepep-uccl-mb4-off"])
    assert deep.stages.layers == (*(8,) * 7, 5) and deep.recipe.gradient_reduce == "bf16"


def test_dispatchers_alone_differ_in_nothing_else() -> None:
    rows = dispatcher_rows()
    perfect = [
        ScoredDispatcherRow(
            id=r.id, dispatcher=r.dispatcher, measured_s=r.iteration_s, predicted_s=r.iteration_s
        )
        for r in rows
    ]
    plans, alone = dispatcher_order(rows, perfect)
    assert plans.pairs_right == plans.pairs > alone.pairs == alone.pairs_right == 18
    assert alone.regret_worst == 0.0


CASE = """model: llama-3-8b
cluster: {accelerator: h100-sxm, nodes: 1}
parallel: {zero_stage: 3, microbatch: 1}
schedule: 1f1b
precision: bf16
batch: {sequences: 64, sequence_length: 2048}
recompute: full
"""


def test_cases_score_speed_memory_and_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "one.yaml").write_text(CASE)
    table = tmp_path / "measured.csv"
    table.write_text(
        "scenario,source,framework,metric,value,unit,scored,remark\n"
        "one,s,none,step_time,1000,s,yes,\none,s,none,verdict,fits,,yes,\n"
        "one,s,none,colour,3,,yes,\none,s,none,step_time,1,s,no,not ours\nnowhere,s,none,verdict,fits,,yes,\n"
    )
    slow, verdict, unknown, unscored, missing = score_cases(table)
    assert slow.right is False and slow.relative_error is not None and slow.relative_error < -0.9
    assert verdict.right is True
    assert "colour" in unknown.refused and "not ours" in unscored.refused and "nowhere" in missing.refused
    assert _exit("--rows", str(table)) == 0
    assert "verdicts on memory: 1 of 1" in capsys.readouterr().out


def test_a_ratio_is_to_the_case_beside_it_where_there_is_one(tmp_path: Path) -> None:
    """The other run may differ in more than the dispatcher, as two trainers do."""
    table = tmp_path / "measured.csv"
    table.write_text(
        "scenario,source,framework,metric,value,unit,scored,remark\none-deepep,s,none,ratio_to_nccl,1,,yes,\n"
    )
    (tmp_path / "one-deepep.yaml").write_text(CASE)
    assert score_cases(table)[0].predicted == "1"
    (tmp_path / "one-nccl.yaml").write_text(CASE.replace("sequence_length: 2048", "sequence_length: 4096"))
    assert float(score_cases(table)[0].predicted) > 1.5


def test_a_case_whose_rates_come_from_its_own_run_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only where the trace's scenario is the case, or the profile does not name one."""
    for name, scenario in (("own", "one"), ("other", "another"), ("unnamed", "")):
        origin = {"files": [{"name": "run.json", "sha256": "a" * 64}], "gpu": "H100", "ranks": 1, "steps": 1}
        origin |= {"date": "2026-11-26", "base": "h100-layers", "scenario": scenario}
        profile = load_profile("h100-layers").model_copy(
            update={"name": name, "trace": TraceOrigin.model_validate(origin), "include": ()}
        )
        write_profile(profile, tmp_path / f"{name}.yaml")
        (tmp_path / f"{name}-case.yaml").write_text(f"{CASE}name: one\nprofile: {tmp_path / name}.yaml\n")
    table = tmp_path / "measured.csv"
    lines = [f"{name}-case,s,none,step_time,1,s,yes,\n" for name in ("own", "other", "unnamed")]
    table.write_text("scenario,source,framework,metric,value,unit,scored,remark\n" + "".join(lines))
    own, other, unnamed = score_cases(table)
    assert "run.json, which is scored here" in own.own_rates and other.own_rates == ""
    assert "does not say of which scenario" in unnamed.own_rates
    assert _exit("--rows", str(table)) == 0
    assert "Note: the profile own has its rates" in capsys.readouterr().out


def test_a_table_of_others_words_is_scored_row_by_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "rows.csv"
    row = "Llama-3-8B,{gpu},8,1,1,1,8,16,1,2048,{precision},1.0"
    lines = [row.format(gpu=gpu, precision=how) for gpu, how in (("H100", "bf16"), ("H100", "nvfp4"))]
    table.write_text("model,hardware,gpus,tp,pp,ep,dp,gbs,mbs,seq,precision,s/step\n" + "\n".join(lines))
    assert _exit("--rows", str(table), "--json", "--workers", "1") == 0
    fine, fp4 = json.loads(capsys.readouterr().out)["rows"]
    assert fine["predicted_step_s"] > 0.0 and not fine["refused"]
    assert "do not apply scales of 16" in fp4["refused"]


def _exit(*arguments: str) -> object:
    with pytest.raises(SystemExit) as stopped:
        main(["validate", *arguments])
    return stopped.value.code


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a,b\n1,2\n", "no table that is scored"),
        ("a,b\n", "no row below"),
        ("a,b\n1\n", "row 1"),
        ("", "empty"),
    ],
)
def test_other_tables_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    file = tmp_path / "rows.csv"
    file.write_text(text)
    assert _exit("--rows", str(file)) == 2
    assert said in capsys.readouterr().err
    assert _exit("--all", "--rows", str(file)) == 2


def test_a_quoted_table_that_breaks_off_says_where(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text('a,b\n"1,2\n')
    with pytest.raises(InputError, match="not CSV"):
        file_records(file)
