"""What the next step works on: budgets, order, blocks, preemption, hand-over and drafts."""

from __future__ import annotations

from moesim.simulator.serving.requests import Requests, requests_of
from moesim.simulator.serving.scheduler import Policy, Scheduler, StepBatch


def of(*lengths: tuple[int, int]) -> Requests:
    """Requests of (input, output) tokens that come together."""
    inputs, outputs = zip(*lengths, strict=True)
    return requests_of([0] * len(lengths), inputs, outputs)


def rank(policy: Policy, requests: Requests) -> Scheduler:
    scheduler = Scheduler(policy, requests)
    for request in range(len(requests)):
        scheduler.add(request)
    return scheduler


def test_a_mixed_step_cuts_the_prompt_that_exceeds_its_budget() -> None:
    scheduler = rank(Policy(8, 100), of((60, 3), (70, 3)))
    assert scheduler.plan() == StepBatch(0, 0, 2, 100, 60 * 61 // 2 + 40 * 41 // 2)
    assert scheduler.advance(1).first == [0]
    second = scheduler.plan()  # request 0 decodes beside the 30 tokens that are left of request 1
    assert second == StepBatch(1, 61, 1, 30, 30 * 40 + 30 * 31 // 2)
    assert scheduler.advance(1).first == [1]


def test_load_counts_those_that_wait_four_times() -> None:
    scheduler = rank(Policy(1, 100), of((10, 3), (10, 3), (10, 3)))
    scheduler.plan()
    assert scheduler.load == 4 * 2 + 1


def test_prefills_go_first_and_alone_where_steps_are_not_mixed() -> None:
    scheduler = rank(Policy(8, 100, mixed=False), of((60, 3), (70, 3)))
    scheduler.plan()
    scheduler.advance(1)
    assert scheduler.plan() == StepBatch(0, 0, 1, 30, 30 * 40 + 30 * 31 // 2)
    scheduler.advance(1)
    assert scheduler.plan() == StepBatch(2, 61 + 71, 0, 0, 0)


def test_whole_prompts_wait_for_a_step_of_their_own() -> None:
    scheduler = rank(Policy(8, 100, chunked=False), of((60, 3), (70, 3)))
    assert scheduler.plan().prefill_tokens == 60
    scheduler.advance(1)
    assert scheduler.plan().prefill_tokens == 70


def test_sequences_end_after_their_last_token() -> None:
    scheduler = rank(Policy(8, 100), of((10, 1), (10, 4)))
    scheduler.plan()
    assert scheduler.advance(1)[:2] == ([0, 1], [0])
    scheduler.plan()
    assert scheduler.horizon(99) == 3
    assert scheduler.advance(3).last == [1]
    assert not scheduler.busy


def test_the_newest_gives_its_blocks_up_and_computes_them_again() -> None:
    scheduler = rank(Policy(8, 100, block_tokens=4, kv_blocks=5), of((8, 9), (8, 9)))
    scheduler.plan()
    scheduler.advance(1)
    assert scheduler.plan().decodes == 1  # two of nine tokens each need three blocks, and there are five
    assert scheduler.preemptions == 1 and scheduler.waiting[0][:2] == (1, 1)
    assert scheduler._blocks(0) == 2 and scheduler._blocks(1) == 3
    ended: list[int] = []
    while scheduler.busy:
        scheduler.plan()
        ended += scheduler.advance(scheduler.horizon(99)).last
    assert ended == [0, 1] and scheduler._blocks(0) == 0


def test_a_reservation_keeps_a_request_out_whose_answer_would_not_fit() -> None:
    lengths = of((8, 9), (8, 9))
    greedy = Policy(8, 100, block_tokens=4, kv_blocks=8)
    assert rank(greedy, lengths).plan().prefills == 2
    reserved = Policy(8, 100, block_tokens=4, kv_blocks=8, reserve_new=1.0, reserve_running=1.0)
    scheduler = rank(reserved, lengths)
    assert scheduler.plan().prefills == 1
    while scheduler.busy:
        scheduler.plan()
        scheduler.advance(scheduler.horizon(99))
    assert scheduler.preemptions == 0


def test_drafts_shorten_the_answer_and_fill_blocks_faster() -> None:
    scheduler = rank(Policy(8, 100, block_tokens=4, gain=2.5), of((10, 11)))
    scheduler.plan()
    scheduler.advance(1)
    assert scheduler.plan().context == 11
    assert scheduler.horizon(99) == 4  # ten tokens after the first, 2.5 a step
    scheduler.advance(2)
    assert scheduler.plan().context == 16
    assert scheduler._blocks(0) == 4  # 15 tokens
    scheduler.advance(2)
    assert not scheduler.busy and scheduler._blocks(0) == 0


def test_a_handed_over_sequence_keeps_its_blocks_until_they_are_let_go() -> None:
    policy = Policy(8, 100, block_tokens=4, kv_blocks=4)
    prompts = Scheduler(Policy(8, 100, block_tokens=4, kv_blocks=4, prompts_only=True), of((10, 5)))
    prompts.add(0)
    prompts.plan()
    assert prompts.advance(1) == ([0], [], [0])
    assert prompts._blocks(0) == 3 and not prompts.busy
    prompts.let_go(0)
    assert prompts._blocks(0) == 0
    decodes = Scheduler(policy, of((10, 5)))
    decodes.add(0, 1, ready=True)
    assert decodes.plan() == StepBatch(1, 11, 0, 0, 0)
    assert decodes.horizon(99) == 4
    assert decodes.advance(4).last == [0]
