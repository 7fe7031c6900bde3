"""Requests through replicas: queues, cuts of stretches, steps planned ahead, routing, hand-over, sampling."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from msgspec.structs import replace

from moesim.hwmodels.errors import InfeasibleError
from moesim.simulator.scenario.serving import ServingPool
from moesim.simulator.serving.replicas import (
    PromptChunk,
    ReplicaPool,
    Served,
    StepPace,
    prefix_aware,
    serve_requests,
)
from moesim.simulator.serving.requests import Requests, arrivals, requests_of
from moesim.simulator.serving.scheduler import Policy, Scheduler, StepBatch

MS = 1_000_000


class Steps:
    """Every step takes so long, and a prompt's token some more."""

    def __init__(self, step_ns: int = 10 * MS, token_ns: int = 0) -> None:
        self.step_ns, self.token_ns = step_ns, token_ns

    def pace(self, now_ns: int, ranks: Sequence[StepBatch]) -> StepPace:
        return StepPace(self.step_ns + self.token_ns * max(batch.prefill_tokens for batch in ranks))


def pool(replicas: int = 1, ranks: int = 1, steps: Steps | None = None, **policy: object) -> ReplicaPool:
    return ReplicaPool(replicas, Policy(**({"max_num_seqs": 8, "max_num_batched_tokens": 1000} | policy)),  # type: ignore[arg-type]
                steps or Steps(), ranks)  # fmt: skip


def load(*requests: tuple[float, int, int]) -> Requests:
    """Requests of (ms, input, output)."""
    times, inputs, outputs = zip(*requests, strict=True)
    return requests_of(np.array(times) * MS, inputs, outputs)


def drawn(count: int, rate: float, seed: int = 0) -> Requests:
    lengths = np.random.default_rng(seed).integers(1, 200, (2, count))
    return requests_of(arrivals(rate, count, seed), *lengths)


def ms(times: object) -> list[float]:
    return [float(time) / MS for time in np.asarray(times)]


def test_an_arrival_cuts_a_stretch_of_decodes_at_its_present_step() -> None:
    served = serve_requests(load((0, 5, 10), (34, 5, 2)), pool())
    assert ms(served.scheduled_ns) == [0, 40]
    assert ms(served.first_token_ns) == [10, 50]
    assert ms(served.last_token_ns) == [100, 60]
    assert served.pools[0].steps == 10 and served.pools[0].busy_ns == 100 * MS


def test_engines_that_plan_ahead_see_an_arrival_one_step_later() -> None:
    served = serve_requests(load((0, 5, 10), (34, 5, 2)), pool(ahead=True))
    assert ms(served.scheduled_ns) == [0, 50]
    assert ms(served.last_token_ns) == [100, 70]


def test_an_idle_engine_that_plans_ahead_begins_at_once() -> None:
    served = serve_requests(load((0, 5, 1), (34, 5, 1)), pool(ahead=True))
    assert ms(served.first_token_ns) == [10, 44]


def test_a_place_is_free_one_step_later_where_steps_are_planned_ahead() -> None:
    two = load((0, 5, 3), (1, 5, 3))
    assert ms(serve_requests(two, pool(max_num_seqs=1)).scheduled_ns) == [0, 30]
    served = serve_requests(load((0, 5, 3), (0, 5, 9), (1, 5, 3)), pool(max_num_seqs=2, ahead=True))
    assert served.scheduled_ns[2] > served.last_token_ns[0]


def test_one_server_keeps_the_law_of_its_queue() -> None:
    requests = drawn(4000, 60.0)
    one = requests_of(requests.arrival_ns, np.full(4000, 1), np.full(4000, 1))
    served = serve_requests(one, pool(max_num_seqs=1))
    wait = (served.scheduled_ns - served.arrival_ns).mean() / MS
    assert wait == pytest.approx(0.6 / (2 * 0.4) * 10, rel=0.1)  # M/D/1 at 60 % load


def test_littles_law_joins_the_counts_to_the_times() -> None:
    served = serve_requests(drawn(2000, 8.0), pool(2), sample_ns=50 * MS)
    there = (served.last_token_ns - served.arrival_ns).sum() / served.last_token_ns.max()
    assert np.array(served.counts)[:, 1:3].sum(axis=1).mean() == pytest.approx(there, rel=0.02)


@pytest.mark.parametrize(
    ("route", "expected"), [("round_robin", [0, 1, 0, 1]), ("least_loaded", [0, 1, 1, 1])]
)
def test_routers(route: str, expected: list[int]) -> None:
    requests = load((0, 5, 90), (1, 5, 1), (30, 5, 1), (60, 5, 1))
    assert serve_requests(requests, pool(2), route=route).rank.tolist() == expected


def test_a_prefix_draws_requests_to_the_rank_that_has_it() -> None:
    ids = [[1, 2], [7, 8], [7, 9], [1, 2]]
    requests = requests_of(np.array([0, 1, 200, 400]) * MS, [8] * 4, [2] * 4, ids, 4)
    served = serve_requests(requests, pool(2, block_tokens=4), route="prefix_aware")
    assert served.rank.tolist() == [0, 1, 1, 0]
    assert served.pools[0].cached_tokens == 4 + 7  # the last token of a prompt is always computed


def test_prompts_are_handed_over_on_one_link_after_the_other() -> None:
    prompts = pool(prompts_only=True)
    served = serve_requests(
        load((0, 400, 3), (0, 400, 3)), pool(), prefill=prompts, transfer_ns=lambda tokens: tokens * MS // 10
    )
    assert ms(served.first_token_ns) == [10, 10]
    assert ms(served.transfer_ns) == [40, 80]
    assert ms(served.last_token_ns) == [70, 110]
    assert [log.steps for log in served.pools] == [4, 1]


def test_chunks_of_a_prompt_go_ahead_where_the_engine_sends_them() -> None:
    sent = {}
    for ahead in (False, True):
        prompts = pool(prompts_only=True, max_num_batched_tokens=100, sends_chunks=ahead)
        served = serve_requests(
            load((0, 400, 3), (0, 60, 3)), pool(), prefill=prompts, transfer_ns=lambda n: n * MS // 10
        )
        assert ms(served.first_token_ns) == [40, 50]
        sent[ahead] = ms(served.transfer_ns)
    assert sent == {False: [40, 36], True: [10, 6]}, "the last chunk is left, and the link is free for others"


def test_a_pool_for_prompts_waits_for_blocks_that_are_on_their_way() -> None:
    prompts = pool(prompts_only=True, block_tokens=4, kv_blocks=5)
    served = serve_requests(
        load((0, 16, 2), (0, 16, 2)), pool(), prefill=prompts, transfer_ns=lambda tokens: 100 * MS
    )
    assert ms(served.scheduled_ns) == [0, 110]


def test_a_closed_loop_keeps_its_number_under_way() -> None:
    served = serve_requests(drawn(40, 1.0), pool(max_num_seqs=99), concurrency=4)
    ends = np.sort(served.last_token_ns)
    assert (served.arrival_ns[:4] == 0).all()
    assert served.arrival_ns[4:].tolist() == ends[:-4].tolist()


def test_the_sampling_interval_doubles() -> None:
    served = serve_requests(drawn(300, 20.0), pool(), sample_ns=MS, most_samples=64)
    times = np.array([time for time, *_ in served.counts])
    assert len(times) < 64 and len(set(np.diff(times))) == 1


def test_what_can_never_be_served_is_said() -> None:
    with pytest.raises(InfeasibleError, match="1 of 2 requests cannot be served"):
        serve_requests(load((0, 5, 1), (1, 50, 1)), pool(block_tokens=4, kv_blocks=4))


def same(one: Served, other: Served) -> bool:
    arrays = ("scheduled_ns", "first_token_ns", "last_token_ns", "rank")
    return (
        all((getattr(one, name) == getattr(other, name)).all() for name in arrays)
        and one.pools == other.pools
        and one.counts == other.counts
    )


def test_the_same_load_gives_the_same_times_again() -> None:
    requests = drawn(200, 40.0)
    assert same(
        *(
            serve_requests(requests, pool(3, 2, block_tokens=4, kv_blocks=90), sample_ns=100 * MS)
            for _ in range(2)
        )
    )


def test_new_requests_wait_for_the_next_look_of_the_engine() -> None:
    log = requests_of([0, 25, 26], [4, 4, 4], [100, 5, 5])
    often = serve_requests(log, ReplicaPool(1, Policy(4, 64), Steps(10)))
    seldom = serve_requests(log, ReplicaPool(1, Policy(4, 64, wait_steps=10), Steps(10)))
    assert often.scheduled_ns.tolist() == [0, 30, 30]
    assert seldom.scheduled_ns.tolist() == [0, 110, 110]  # ten steps after the prompt's


def test_prompts_of_data_parallel_ranks_go_together_or_at_the_latest_after_the_wait() -> None:
    policy = Policy(4, 64, wait_steps=10, wait_for_ranks=True)
    log = requests_of([0, 0, 25, 45], [4] * 4, [100, 100, 5, 5])
    together = serve_requests(log, ReplicaPool(1, policy, Steps(10), 2))
    assert together.scheduled_ns.tolist() == [0, 0, 50, 50]
    alone = serve_requests(log.some(np.arange(3)), ReplicaPool(1, policy, Steps(10), 2))
    assert alone.scheduled_ns.tolist() == [0, 0, 100]


def test_ranks_that_wait_for_each_other_get_requests_by_their_number() -> None:
    """A waiting request counts once: the rank whose sequence ends gets the next one, as in TensorRT-LLM."""
    log = requests_of([0] * 4 + [62, 64], [4] * 6, [4, 100, 100, 100, 50, 50])
    policy = Policy(8, 64, wait_steps=100, wait_for_ranks=True)
    counted = serve_requests(log, ReplicaPool(1, policy, Steps(10), 2))
    assert counted.rank.tolist() == [0, 1, 0, 1, 0, 0]
    weighed = serve_requests(
        log, ReplicaPool(1, replace(policy, wait_steps=0, wait_for_ranks=False), Steps(10), 2)
    )
    assert weighed.rank.tolist()[:5] == [0, 1, 0, 1, 0]


def test_waiting_for_other_ranks_needs_some() -> None:
    with pytest.raises(ValueError, match="nothing to wait for"):
        ServingPool(dp=2, wait_for_ranks=True)


def test_the_tokeniser_takes_prompts_one_after_another() -> None:
    log = requests_of([0, 0, 0], [4, 4, 4], [2, 2, 2])
    served = serve_requests(
        log, ReplicaPool(1, Policy(4, 64), Steps(10)), front_ns=lambda tokens: 25 * tokens
    )
    assert served.scheduled_ns.tolist() == [100, 200, 300]


# -- laws that no test above holds, as mutants of the modules showed ----------------------------------------


def test_what_was_handed_over_is_not_computed_again() -> None:
    seen: list[PromptChunk] = []
    served = serve_requests(
        load((0, 40, 3)), pool(steps=Steps(token_ns=MS)), prefill=pool(2, prompts_only=True),
        transfer_ns=lambda tokens: 5 * MS, watch=seen.append,
    )  # fmt: skip
    assert ms(served.last_token_ns) == [35], "two decode steps of 10 ms, and no prompt's tokens"
    assert seen == [PromptChunk(0, True, 0, 0, 10 * MS, 40)]
    assert served.prefill_rank.tolist() == served.rank.tolist() == [0]


def test_the_least_loaded_of_all_ranks_decodes_what_was_handed_over() -> None:
    served = serve_requests(
        load(*[(0, 4, 50)] * 6), pool(3, 2), prefill=pool(2, 2, prompts_only=True), route="round_robin"
    )
    assert sorted(served.rank.tolist()) == list(range(6))
    assert served.prefill_rank.tolist() == [0, 1, 2, 3, 0, 1]


def test_a_prefix_draws_no_more_where_loads_differ_by_more_than_the_routers_bounds() -> None:
    for waiting, expected in ((15, 0), (18, 1)):  # four each, beside one that runs: 61 and 73 against 0
        ranks = [Scheduler(Policy(1, 100, 4), requests_of([0], [8], [2], [[1, 2]], 4)) for _ in range(2)]
        ranks[0].cache.take([1, 2], 0)
        assert prefix_aware(0, ranks, [1 + 4 * waiting, 0]) == expected
        assert prefix_aware(0, ranks, [1 + 4 * waiting + 300, 300]) == 0, "below 1.5 times"


def test_requests_that_the_engine_has_not_looked_at_count_for_the_router() -> None:
    log = requests_of([0, 0, 25, 26, 27], [4] * 5, [100, 100, 5, 5, 5])
    served = serve_requests(log, ReplicaPool(2, Policy(9, 64, wait_steps=10), Steps(10)))
    assert served.rank.tolist() == [0, 1, 0, 1, 0]


def test_prompts_that_waited_for_other_ranks_go_as_many_as_a_step_takes() -> None:
    policy = Policy(9, 8, wait_steps=10, wait_for_ranks=True)
    log = requests_of([0, 0, 25, 25, 25, 25], [4, 4, 5, 5, 5, 5], [100, 100, 5, 5, 5, 5])
    served = serve_requests(log, ReplicaPool(1, policy, Steps(10), 2))
    assert served.scheduled_ns.tolist()[2:] == [30, 30, 40, 40]
    three = requests_of([0, 0, 25, 25, 25, 25], [4, 4, 3, 3, 5, 5], [100, 100, 5, 5, 5, 5])
    assert serve_requests(three, ReplicaPool(1, policy, Steps(10), 2)).scheduled_ns.tolist()[2:] == [30] * 4
