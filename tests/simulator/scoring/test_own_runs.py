"""Our own runs: what is trained is what is predicted, and nobody rewrites a frozen prediction."""

from __future__ import annotations

import pytest

from moesim.hwmodels import InputError
from moesim.simulator.scoring import own_runs


def test_a_scenario_has_the_shape_that_torchtitan_is_given() -> None:
    for run in own_runs.file().runs:
        scenario = own_runs.scenario_of(run.name)
        titan = own_runs.file().models[run.model].torchtitan
        arguments, experts = titan["arguments"], titan["moe"]
        shape, moe = scenario.shape, scenario.shape.moe
        assert (shape.n_layers, shape.hidden, shape.vocab) == (
            arguments["n_layers"], arguments["dim"], arguments["vocab_size"],
        )  # fmt: skip
        assert moe is not None and (moe.experts, moe.top_k, moe.expert_ffn) == (
            experts["num_experts"], experts["top_k"], arguments["moe_inter_dim"],
        )  # fmt: skip
        assert moe.router_bias == experts.get("gate_bias", False)
        heads = own_runs.file().models[run.model].shape
        for attention in heads.get("attentions", {"": heads.get("attention")}).values():
            assert [attention[key] for key in ("heads", "kv_heads", "head_dim")] == [
                arguments[key] for key in ("n_heads", "n_kv_heads", "head_dim")
            ]
        assert scenario.machine.n_gpus == scenario.parallel.ep == own_runs.GPUS == 2
        assert scenario.batch.sequences == 2 * run.microbatch


def test_frozen_predictions_are_those_that_were_frozen() -> None:
    assert own_runs.changed_freezes() == ()
    names = [run.name for run in own_runs.file().runs]
    for date in own_runs.FREEZES:
        assert [line.name for line in own_runs.frozen() if line.date == date] == names
    assert all(line.p10_s < line.p50_s < line.p90_s for line in own_runs.frozen())


def test_a_rewritten_freeze_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    line = own_runs.frozen()[0]
    other = (line.model_copy(update={"active_gib": line.active_gib + 0.01}), *own_runs.frozen()[1:])
    monkeypatch.setattr(own_runs, "frozen", lambda: other)
    assert own_runs.changed_freezes() == (line.date,)


def test_an_unknown_run_is_refused_and_overrides_apply() -> None:
    with pytest.raises(InputError, match=r"qwen3-like-b3.*qwen3-like-b2"):
        own_runs.scenario_of("qwen3-like-b3")
    assert own_runs.scenario_of("gpt-oss-like-b2", "software.attention=flash").software.attention == "flash"
