"""Sizing: the closed form follows its laws and the events; what nothing meets names the nearest limits."""

import re
from typing import Any

import numpy as np
import pytest

from moesim.hwmodels.errors import InfeasibleError, InputError
from moesim.simulator.scenario import Scenario, load_scenario
from moesim.simulator.scenario.serving import ServingLimits
from moesim.simulator.serving.candidates import front, space_of
from moesim.simulator.serving.closed_form import (
    DecodingPool,
    LoadMoments,
    PromptPool,
    candidate,
    fewest,
    moments,
    step_tables,
)
from moesim.simulator.serving.deployment import deployments
from moesim.simulator.serving.requests import requests_of
from moesim.simulator.serving.simulate import serve
from moesim.simulator.serving.sizing import machines, serve_plan

LIMITS = {"ttft_s": 1.0, "tpot_s": 0.03}
SPACE = {"tp": [4], "dp": [1], "ep": [1, 4], "max_num_seqs": [64], "max_num_batched_tokens": [4096]}


def _scenario(**serving: Any) -> Scenario:
    load = {"rate_per_s": 8.0, "input_tokens": 512, "output_tokens": 64, "requests": 200}
    data = {"tp": 4, "load": load, "limits": LIMITS, **serving}
    cluster = {"accelerator": "h100-sxm", "nodes": 4}
    return load_scenario({"name": "small", "model": "mixtral-8x7b", "cluster": cluster, "serving": data}, [])


def _load(rate: float = 8.0) -> LoadMoments:
    requests = requests_of(np.arange(50) * 1e9, [512] * 50, [64] * 50)
    return moments(requests, rate, True)


def test_moments_take_the_prefix_cache_from_the_log() -> None:
    requests = requests_of([0, 2e9], [1024, 1024], [10, 30], [[1, 2], [1, 3]], 512)
    load = moments(requests, None, True)
    assert (load.rate_per_s, load.inputs, load.fresh, load.outputs) == (1.0, 1024, 768, 20)
    assert moments(requests, 5.0, False).fresh == 1024
    assert load.longest == 1054


def test_more_replicas_are_faster_and_fewest_is_the_least_that_meets() -> None:
    (one,) = deployments(_scenario())
    load, limits = _load(60.0), ServingLimits(**LIMITS)
    made = candidate(one, step_tables([one], load)[0], load)
    pool = DecodingPool([made], load, limits)
    replicas = fewest(pool, 400)
    assert replicas[0] > 1
    assert pool.at(replicas).why[0] == 0
    assert pool.at(replicas - 1).why[0] > 0
    times = [pool.at(np.array([n])) for n in (20.0, 40.0, 80.0)]
    assert times[0].tpot_s > times[1].tpot_s > times[2].tpot_s
    assert times[0].sequences == pytest.approx(2 * times[1].sequences, rel=0.2)


def test_prompts_wait_longer_the_busier_they_are() -> None:
    pools = deployments(_scenario(prefill={"tp": 4}))
    one = pools[1]
    assert one.role == "prefill"
    slow = [
        float(
            PromptPool([candidate(one, step_tables([one], load)[0], load)], load, ServingLimits())
            .at(np.ones(1))
            .ttft_s[0]
        )
        for load in (_load(1.0), _load(20.0))
    ]
    assert slow[0] < slow[1] < np.inf


def test_a_plan_is_served_within_its_limits_and_serve_says_the_same() -> None:
    found = serve_plan(_scenario(), vary=SPACE, max_gpus=32, top=2)
    best = found.best
    assert best.share_in_limits is not None
    assert best.share_in_limits >= 0.9
    assert best.ttft_s.value <= LIMITS["ttft_s"]
    assert found.considered == 2 + 2 * 2
    assert found.closed_tpot_error is not None
    assert found.closed_tpot_error < 0.3
    served = serve(best.scenario)
    assert served.goodput is not None
    assert served.goodput.share == best.share_in_limits


def test_limits_that_nothing_meets_name_the_nearest() -> None:
    with pytest.raises(InfeasibleError, match=r"nearest limits .* serving.limits.tpot_s=0.0"):
        serve_plan(_scenario(limits={"tpot_s": 0.0001}), vary=SPACE, modes=("aggregated",))
    with pytest.raises(InfeasibleError) as missed:
        serve_plan(_scenario(limits={"tpot_s": 1e-5}), vary=SPACE, modes=("disaggregated",))
    assert "TPOT 0.01 ms" in str(missed.value)
    assert sum(4 * int(n) for n in re.findall(r"(\d+) x TP4", str(missed.value))) <= 32


def test_bad_questions() -> None:
    with pytest.raises(InputError, match="objective"):
        serve_plan(_scenario(), objective="speed")
    with pytest.raises(InputError, match="closed loop"):
        serve_plan(_scenario(load={"arrivals": "concurrency", "concurrency": 4}))
    with pytest.raises(InputError, match="cannot vary"):
        space_of({"replicas": "1,2"})
    with pytest.raises(InputError, match="no whole number"):
        space_of({"tp": "x"})
    with pytest.raises(InputError, match="h100-sxm"):
        machines(_scenario(), ("h100-smx",), None)
    assert machines(_scenario(), ("h200",), 8)[0].machine.accelerator.name == "h200-sxm"


def test_a_front_is_beaten_by_nothing_and_spaced() -> None:
    assert front([10.0, 9.9, 5.0, 4.0], [1.0, 2.0, 3.0, 2.5]) == [0, 2]
