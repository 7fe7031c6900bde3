"""Steps of engines: terms add up, two micro-batches gain where compute can hide the exchange."""

import pytest

from moesim.hwmodels.calibration import load_profile
from moesim.hwmodels.cluster import load_cluster
from moesim.hwmodels.errors import InfeasibleError, InputError
from moesim.simulator.model.catalogue import load_model
from moesim.simulator.scenario.serving import Serving
from moesim.simulator.serving.deployment import Deployment, accepted_tokens
from moesim.simulator.serving.scheduler import Batch
from moesim.simulator.serving.step import StepModel, overlapped


def _deployment(**pool: object) -> Deployment:
    serving = Serving.model_validate({"engine": "deepseek-online", **pool})
    cluster = load_cluster("deepseek-h800-2048")
    return Deployment(load_model("deepseek-v3"), cluster, load_profile("h800-published"), serving, serving)


def test_parts_add_up_and_lie_in_the_interval() -> None:
    cost = StepModel(_deployment(dp=16, ep=16)).cost([Batch(64, 64 * 4096, 0, 0, 0)] * 16)
    assert sum(part.exposed_s for part in cost.parts) == pytest.approx(cost.seconds)
    assert cost.low < cost.seconds < cost.high


def test_two_micro_batches_hide_the_shorter_of_compute_and_exchange() -> None:
    assert overlapped(3.0, 1.0) == 6.0
    assert overlapped(1.0, 3.0) == 6.0
    assert overlapped(2.0, 2.0) == 4.0


def test_what_does_not_fit_names_the_fewest_gpus() -> None:
    with pytest.raises(InfeasibleError, match="16 GPUs a replica would do"):
        _ = _deployment(tp=8, ep=8).cache_tokens


def test_contexts_beyond_the_model_are_refused() -> None:
    with pytest.raises(InputError, match="163,840"):
        _deployment(dp=32, ep=32).check_context(200_000)


def test_accepted_tokens_come_from_measurements() -> None:
    assert accepted_tokens("glm-5.2", 2) == 2.50
    assert accepted_tokens("deepseek-v3", 0) == 1.0
