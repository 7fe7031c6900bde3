"""Steps of engines: terms add up, two micro-batches gain where compute can hide the exchange."""

import numpy as np
import pytest
from msgspec.structs import replace

from moesim.hwmodels.calibration import load_profile
from moesim.hwmodels.cluster import load_cluster
from moesim.hwmodels.errors import InfeasibleError, InputError
from moesim.simulator.model.catalogue import load_model
from moesim.simulator.scenario.serving import Serving
from moesim.simulator.serving.deployment import Deployment, Spreads, accepted_tokens
from moesim.simulator.serving.scheduler import StepBatch
from moesim.simulator.serving.step import StepModel, in_slots, overlapped


def _deployment(**pool: object) -> Deployment:
    serving = Serving.model_validate({"engine": "deepseek-online", **pool})
    cluster = load_cluster("deepseek-h800-2048")
    return Deployment(load_model("deepseek-v3"), cluster, load_profile("h800-published"), serving, serving)


def test_parts_add_up_and_lie_in_the_interval() -> None:
    cost = StepModel(_deployment(dp=16, ep=16)).cost([StepBatch(64, 64 * 4096, 0, 0, 0)] * 16)
    assert sum(part.exposed_s for part in cost.parts) == pytest.approx(cost.seconds)
    assert cost.low < cost.seconds < cost.high


def test_two_micro_batches_hide_the_shorter_of_compute_and_exchange() -> None:
    assert overlapped(3.0, 1.0) == 6.0
    assert overlapped(1.0, 3.0) == 6.0
    assert overlapped(2.0, 2.0) == 4.0
    assert in_slots(2.0, 2.0, 1.0, 1.0) == overlapped(4.0, 2.0)
    assert in_slots(1.0, 3.0, 2.0, 2.0) == 2.0 + 3.0 + 3.0 + 2.0 > overlapped(4.0, 4.0)


def test_prompts_alone_run_at_the_power_limit() -> None:
    """FP8 products on Hopper sustain 0.85 to 0.95 of their rate in a burst (profile hopper-sustained)."""
    both = _deployment(dp=16, ep=16)
    batch = [StepBatch(0, 0, 2, 8_192, 8_192 * 2_048)] * 16
    burst, sustained = (StepModel(replace(both, role=role)).cost(batch) for role in ("both", "prefill"))
    o_proj = [
        next(part.busy_s for part in cost.parts if part.name == "o_proj") for cost in (burst, sustained)
    ]
    assert 0.85 < o_proj[0] / o_proj[1] < 0.95


def test_what_does_not_fit_names_the_fewest_gpus() -> None:
    with pytest.raises(InfeasibleError, match="16 GPUs a replica would do"):
        _ = _deployment(tp=8, ep=8).cache_tokens


def test_contexts_beyond_the_model_are_refused() -> None:
    with pytest.raises(InputError, match="163,840"):
        _deployment(dp=32, ep=32).check_context(200_000)


def test_accepted_tokens_come_from_measurements() -> None:
    assert accepted_tokens("glm-5.2", 2) == 2.50
    assert accepted_tokens("deepseek-v3", 0) == 1.0


def _pace_seconds(model: StepModel, ranks: list[StepBatch]) -> float:
    return model.pace(0, ranks).first_ns * 1e-9


@pytest.mark.parametrize("drafts", [0, 2])
def test_tables_keep_the_cost_within_one_percent(drafts: int) -> None:
    model = StepModel(_deployment(dp=16, ep=16, draft_tokens=drafts))
    for batch in (
        StepBatch(37, 37 * 2345, 0, 0, 0),
        StepBatch(201, 201 * 777, 0, 0, 0),
        StepBatch(300, 300 * 9_001, 0, 0, 0),
        StepBatch(0, 0, 3, 3_001, 3_001 * 700),
        StepBatch(0, 0, 1, 97, 97 * 5_000),
    ):
        ranks = [batch] * 15 + [StepBatch(1, 100, 0, 0, 0) if batch.decodes else batch]
        assert _pace_seconds(model, ranks) == pytest.approx(model.cost(ranks).seconds, rel=0.01)


def test_two_micro_batches_gain_with_many_rows_and_lose_with_few() -> None:
    """LMSYS, large-scale EP (2025-05): two-batch overlap gains at 256 tokens a rank and loses at 32."""
    seconds = {
        (rows, overlap): StepModel(_deployment(dp=32, ep=32, two_batch_overlap=overlap))
        .cost([StepBatch(rows, rows * 2_000, 0, 0, 0)] * 32)
        .seconds
        for rows in (32, 256)
        for overlap in (False, True)
    }
    assert seconds[32, True] > seconds[32, False]
    assert seconds[256, True] < seconds[256, False]


def test_with_few_tokens_some_rank_reads_more_experts_than_the_mean() -> None:
    """Top 8 of 256 experts of 4 tokens on 8 ranks: 3.8 experts a rank have rows, 6.6 on the fullest."""
    few, many = _deployment(tp=8, ep=8).fullest(4), _deployment(tp=8, ep=8).fullest(4_096)
    draw = np.random.default_rng(1)
    chosen = draw.random((200, 4, 256)).argsort(axis=2)[:, :, :8]
    touched = np.array([[len(set(one[one // 32 == rank])) for rank in range(8)] for one in chosen])
    assert few[1] == pytest.approx(touched.max(axis=1).mean(), rel=0.1)
    assert many[1] == 32
    assert few[0] > many[0] > 1.0


def test_prefills_under_eplb_have_the_spread_of_inference_unless_another_is_stated() -> None:
    """A density of rows that falls with their power 0.6 (data/serving/expert-load.yaml), drawn."""
    alpha, placed = 0.6, _deployment(dp=32, ep=32, redundant_experts=32)
    rows = np.random.default_rng(1).random(100_000) ** (1 / (1 - alpha))
    assert placed.expert_load(prefill=True) == pytest.approx(rows.std() / rows.mean(), rel=0.02)
    assert placed.fullest(1e6, prefill=True)[0] > placed.fullest(1e6)[0]
    assert replace(placed, spreads=Spreads(0.0, 0.0, 0.3)).expert_load(prefill=True) == 0.3


@pytest.mark.parametrize(
    ("habit", "without", "part"), [("fused_norms", False, "ffn_norm"), ("shared_beside", 0, "shared.gate_up")]
)
def test_habits_of_an_engine_shorten_its_steps(habit: str, without: object, part: str) -> None:
    """Sums over TP that norm as well, and shared experts beside routed ones, each left out once."""
    batch = [StepBatch(8, 8 * 1_000, 0, 0, 0)]
    deployment = _deployment(tp=8, engine="sglang-0.5")
    bare = replace(deployment)
    bare.__dict__["engine"] = deployment.engine.model_copy(update={habit: without})
    with_habit, left_out = StepModel(deployment).cost(batch), StepModel(bare).cost(batch)
    of = [sum(p.busy_s for p in cost.parts if p.name == part) for cost in (with_habit, left_out)]
    assert of[0] < of[1]
    assert left_out.seconds - with_habit.seconds >= of[1] - of[0] - 1e-9


def test_a_host_that_hardly_waits_at_its_middle_may_at_its_slow_end() -> None:
    """A short prompt without a graph: launches are a floor, and their range makes the interval."""
    eager = _deployment(engine="sglang-0.5", tp=8)
    prompt = [StepBatch(0, 0, 1, 500, 500 * 250)]
    cost = StepModel(eager).cost(prompt)
    launches, engine = sum(part.launches for part in cost.parts), eager.engine
    assert cost.seconds == pytest.approx(
        launches * engine.launch_s.value + engine.host_s.value + engine.exposed_host_s.value
    )
    assert cost.high - cost.seconds > 0.9 * launches * (engine.launch_s.high - engine.launch_s.value)
    graph = _deployment(engine="sglang-0.5", tp=8, graph_prefill_tokens=512)
    assert StepModel(graph).cost(prompt).seconds < 0.8 * cost.seconds


def test_drafts_of_an_engine_that_does_not_overlap_them_wait_for_the_host() -> None:
    plain, drafting = (_deployment(engine="sglang-0.5", tp=8, draft_tokens=n) for n in (0, 2))
    host = [
        next(
            part.exposed_s
            for part in StepModel(one).cost([StepBatch(8, 8_000, 0, 0, 0)]).parts
            if part.name == "host"
        )
        for one in (plain, drafting)
    ]
    assert host == [plain.engine.exposed_host_s.value, plain.engine.host_s.value]
    assert plain.host_overlapped and not drafting.host_overlapped
