"""From a scenario to the result of its load, and the exit codes of what cannot be."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moesim
from moesim.cli.root import main
from moesim.hwmodels.errors import InfeasibleError, InputError
from moesim.simulator.scenario import load_scenario
from moesim.simulator.serving.deployment import Deployment
from moesim.simulator.serving.replicas import PaceModel, StepPace
from moesim.simulator.serving.requests import requests_of
from moesim.simulator.serving.results import ServingResult, figure
from moesim.simulator.serving.scheduler import StepBatch
from moesim.simulator.serving.simulate import serve

MODEL = {"model": "qwen3-30b-a3b", "cluster": {"accelerator": "h100-sxm", "nodes": 1}}


class TenMs:
    """Every step takes 10 ms."""

    def __init__(self, deployment: Deployment) -> None:
        pass

    def pace(self, now_ns: int, ranks: Sequence[StepBatch]) -> StepPace:
        return StepPace(10e6)


def times(deployment: Deployment) -> PaceModel:
    return TenMs(deployment)


def scenario(load: dict[str, Any] | None = None, **serving: Any) -> dict[str, Any]:
    drawn = {"rate_per_s": 20, "requests": 100, "input_tokens": 200, "output_tokens": 11}
    return {**MODEL, "serving": {"max_num_seqs": 4, "load": drawn if load is None else load, **serving}}


def served(**serving: Any) -> ServingResult:
    return serve(scenario(**serving), times=times)


def test_the_two_definitions_of_tpot_differ() -> None:
    requests = requests_of([0, 0, 0], [10, 10, 10], [3, 1, 11])
    result = serve(scenario({}), requests=requests, times=times)
    assert result.tpot_request_s is not None and result.tpot_request_s.mean == pytest.approx(0.01)
    assert result.tpot_token_s == pytest.approx(0.01)
    slow = requests_of([0, 0], [10, 9000], [3, 3])  # two steps for the second prompt delay the first's tokens
    other = serve(scenario({}), requests=slow, times=times)
    assert other.output_tokens == 6 and other.ttft_s.p99 > other.ttft_s.p50


def test_rates_money_and_energy_follow_from_time_and_tokens() -> None:
    result = served(tp=2)
    window = result.window
    seconds, tokens = 2 * window.seconds, window.output_tokens
    assert result.gpus == 2 and window.steady and tokens < 1100
    assert result.output_tokens_per_s_per_gpu == pytest.approx(tokens / seconds)
    cost = result.cost
    assert cost.usd_per_gpu_hour is not None and cost.board_watts is not None
    assert cost.usd_per_million_output_tokens == pytest.approx(
        cost.usd_per_gpu_hour * seconds / 3600 / tokens * 1e6
    )
    assert cost.joules_per_output_token == pytest.approx(cost.board_watts * seconds / tokens)


def test_rates_leave_ramp_and_tail_out_and_say_where_nothing_is_steady() -> None:
    arrival = np.arange(400) * 10_000_000  # 100/s of 101 tokens, 10 ms each: a stay of a second in four
    even = serve(
        scenario({}, max_num_seqs=256),
        requests=requests_of(arrival, [10] * 400, [101] * 400),
        times=times,
    )
    assert even.window.steady and 0.9 < even.window.start_s < 1.1 and even.window.end_s == 3.99
    assert even.requests_per_s == pytest.approx(100, rel=0.03)
    assert even.output_tokens_per_s_per_gpu == pytest.approx(10_100, rel=0.03)
    assert "steady" in str(even)
    once = serve(scenario({}), requests=requests_of([0] * 9, [10] * 9, [5] * 9), times=times)
    assert not once.window.steady and once.window.end_s == once.duration_s
    assert (once.window.requests, once.window.input_tokens, once.window.output_tokens) == (9, 90, 45)
    assert "the whole run" in " ".join(str(once).split())


def test_disaggregated_pools_share_the_bill_by_what_they_do() -> None:
    result = served(prefill={"replicas": 3})
    cost = result.cost
    assert result.gpus == 4 and [pool.role for pool in result.pools] == ["decode", "prefill"]
    prompts, answers = cost.joules_per_input_token or 0.0, cost.joules_per_output_token or 0.0
    window = result.window
    assert prompts * window.input_tokens == pytest.approx(3 * answers * window.output_tokens) and answers > 0
    assert result.transfer_s is not None and result.transfer_s.p50 > 10e-6


def test_goodput_counts_requests_that_keep_every_limit() -> None:
    kept = served(limits={"ttft_s": 60.0, "tpot_s": 0.02})
    assert kept.goodput is not None and kept.goodput.share == 1.0 and kept.goodput.met
    missed = served(limits={"tpot_s": 0.001})
    assert missed.goodput is not None and missed.goodput.share == 0 and not missed.goodput.met
    assert missed.goodput.nearest.tpot_s == pytest.approx(0.01)
    assert served().goodput is None


def test_a_load_that_never_drains_names_the_highest_stable_rate() -> None:
    load = {"rate_per_s": 60, "requests": 400, "input_tokens": 200, "output_tokens": 11}
    result = served(load=load)
    # four places of eleven steps, which planning ahead leaves empty for one more
    assert not result.drains and result.highest_stable_per_s == pytest.approx(4 / 0.12, rel=0.03)
    rate = 0.9 * (result.highest_stable_per_s or 0.0)
    assert served(load={**load, "rate_per_s": rate}).drains


def test_a_closed_loop_has_no_offered_rate() -> None:
    load = {
        "arrivals": "concurrency",
        "concurrency": 4,
        "requests": 40,
        "input_tokens": 50,
        "output_tokens": 5,
    }
    result = served(load=load)
    assert result.offered_per_s is None and result.drains
    assert result.requests_per_s == pytest.approx(4 / 0.06, rel=0.05)


def test_the_same_seed_gives_the_same_bytes_and_the_json_gives_the_scenario() -> None:
    first = served()
    assert first.model_dump_json() == served().model_dump_json()
    other = serve(scenario(), "seed=1", times=times)
    assert other.model_dump_json() != first.model_dump_json()
    again = moesim.load(json.loads(other.model_dump_json()))
    assert again.seed == 1 and again.serving == load_scenario(scenario()).serving and not again.trains
    assert other.inputs.plan is None and "batch" not in other.inputs.scenario


def test_overrides_reach_the_section() -> None:
    result = serve(scenario(), "serving.tp=2", "serving.load.rate_per_s=10", times=times)
    assert result.gpus == 2 and result.offered_per_s == pytest.approx(10, rel=0.3)
    assert (
        load_scenario("serve-qwen3-30b-a3b-h100", ["serving.tp=8", "serving.replicas=1"]).serving is not None
    )


@pytest.mark.parametrize("name", moesim.presets(serving=True))
def test_presets_for_serving_are_legal_and_fit(name: str) -> None:
    loaded = moesim.load(name)
    assert name not in moesim.presets() and loaded.name == name
    few = requests_of(np.arange(20) * 10**7, np.full(20, 500), np.full(20, 20))
    result = serve(loaded, requests=few, times=times)
    assert result.requests == 20 and result.inputs.source == name and str(result).startswith(name)


def test_a_preset_for_serving_is_no_training_step() -> None:
    with pytest.raises(InputError, match="moesim serve simulate"):
        moesim.simulate("serve-qwen3-30b-a3b-h100")


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"limits": {"percentile": 99}}, "percentile would not be read"),
        ({"acceptance": [0.8]}, "acceptance would not be read"),
        ({"replicas": 99}, "need 99 GPUs"),
        ({"engine": "vllm"}, "serving.engine='vllm' is not known"),
        ({"tp": 3}, "the nearest that does is 2"),
        ({"tp": 3, "dp": 1, "ep": 3}, "nearest that does"),
        ({"dp": 6, "ep": 6}, "4 more redundant experts"),
        ({"load": {"rate_per_s": 1, "input_tokens": 40_000, "output_tokens": 1_000}}, "40,960"),
    ],
)
def test_what_is_illegal_is_refused(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        served(**keys)


def test_a_sequence_beyond_the_cache_does_not_fit() -> None:
    with pytest.raises(InfeasibleError, match="does not fit the cache"):
        serve(scenario({"rate_per_s": 1, "input_tokens": 39_000}, memory_fraction=0.79), times=times)


def ran(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        main(list(arguments))
    out, err = capsys.readouterr()
    return int(end.value.code or 0), out, err


def test_the_command_prints_the_result_and_says_what_cannot_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(json.dumps(scenario()), "utf-8")
    code, out, _ = ran(capsys, "serve", "simulate", str(path), "--json")
    assert code == 0 and json.loads(out)["requests"] == 100
    code, out, err = ran(capsys, "serve", "simulate", str(path), "--set", "serving.limits.ttft_s=0.000001")
    assert code == 3 and "TTFT" in out and "no request keeps the limits" in err
    code, _, err = ran(capsys, "serve", "simulate", str(path), "--set", "serving.load.rate_per_s=100000")
    assert code == 3 and "the highest stable rate is" in err
    code, _, err = ran(capsys, "serve", "simulate", str(path), "--set", "serving.load.log=none.csv")
    assert code == 2 and "leave it out" in err
    code, out, _ = ran(capsys, "schema", "serving")
    assert code == 0 and "tpot_token_s" in json.loads(out)["properties"]


def test_engines_differ_in_what_they_promise_to_running_requests() -> None:
    load = {"rate_per_s": 400, "requests": 200, "input_tokens": 1000, "output_tokens": 4000}
    lost = {
        engine: served(load=load, engine=engine, max_num_seqs=256, memory_fraction=0.88).preemptions
        for engine in ("vllm-0.19", "trtllm-1.2")
    }
    assert lost["vllm-0.19"] > 0 == lost["trtllm-1.2"]


def test_a_queue_before_the_pool_that_decodes_is_seen() -> None:
    load = {"rate_per_s": 60, "requests": 400, "input_tokens": 200, "output_tokens": 11}
    result = served(load=load, prefill={"max_num_seqs": 64})
    assert result.queue_s.p99 < 0.1 < result.end_to_end_s.p50 and not result.drains
    assert result.highest_stable_per_s == pytest.approx(4 / 0.11, rel=0.03)


def test_slow_steps_enclose_the_result_with_fast_ones() -> None:
    result = serve(scenario(tp=2), with_intervals=True)
    assert result.intervals is not None and result.intervals.slow_drains
    for key in ("tpot_request_s.p50", "ttft_s.p50", "end_to_end_s.p90", "tpot_token_s"):
        known, now = result.intervals.figures[key], figure(result, key)
        assert now is not None and known.low < now < known.high
    assert "transfer_s.p50" not in result.intervals.figures
    assert "(80 % of p50: " in str(result) and "80 %" not in str(serve(scenario(tp=2))).split("decode")[0]


def test_the_fullest_rank_and_its_step_are_in_the_result() -> None:
    one, four = serve(scenario(tp=2)), serve(scenario(tp=1, replicas=4))
    assert one.imbalance is None and four.imbalance is not None
    assert four.imbalance.ranks == 4 and not four.imbalance.experts
    assert 1 < (four.imbalance.fullest_over_mean or 0) <= (four.imbalance.fullest_over_mean_p90 or 0) <= 4
    assert four.decode_step is not None
    assert (four.imbalance.fullest_rank_step_s or 0) > four.decode_step.seconds
    moment = max(four.timeline, key=lambda at: at.running)
    assert moment.fullest_over_mean == pytest.approx(moment.fullest_rank * 4 / moment.running)


def test_experts_whose_load_drifts_slow_the_steps_of_their_time() -> None:
    pools: dict[str, Any] = {
        "dp": 4,
        "ep": 4,
        "load": {"rate_per_s": 20, "requests": 200, "output_tokens": 200},
    }
    even, uneven = ([{"from_s": 0, "expert_load_cv": cv}] for cv in (0.0, 1.5))
    drift = [*even, {"from_s": 5, "expert_load_cv": 1.5}]
    found = [serve(scenario(**pools, expert_drift=each)) for each in (even, drift, uneven)]
    times = [result.tpot_token_s or 0.0 for result in found]
    assert times[0] < times[1] < times[2]
    periods = found[1].imbalance.experts if found[1].imbalance else ()
    assert [period.expert_load_cv for period in periods] == [0.0, 1.5]
    assert periods[0].fullest_over_mean == 1.0 < periods[1].fullest_over_mean
    assert periods[0].decode_step_s < periods[1].decode_step_s
    for key, words in (({"ep": 1}, "ep=1"), ({"expert_drift": drift[1:]}, "begins at 0")):
        with pytest.raises(InputError, match=words):
            serve(scenario(**{**pools, "expert_drift": drift, **key}))


def test_a_result_says_what_prices_its_typical_step() -> None:
    step = serve(scenario(tp=2)).decode_step
    assert step is not None and step.low_s < step.seconds < step.high_s
    assert sum(part.seconds for part in step.parts) == pytest.approx(step.seconds)
    assert sum(step.shares.values()) == pytest.approx(1.0)
    found = {part.name: part.evidence for part in step.parts}  # of an H100
    assert (found["o_proj"], found["final_norm"], found["host"]) == ("measured", "scaled", "assumed")
    h200 = {"cluster": {"accelerator": "h200-sxm", "nodes": 1}}
    on_h200 = serve({**scenario(tp=2, experts="nvfp4"), **h200}).decode_step
    assert on_h200 is not None
    found = {part.name: part.evidence for part in on_h200.parts}  # no table has experts of 4 bits
    assert found["o_proj"] == "measured" and found["experts.down"] == "scaled"
    assert "serving-hopper" in on_h200.profiles and "assumed" in str(serve(scenario(tp=2)))
    assert served().decode_step is None, "other step times have no evidence of the step model's"
