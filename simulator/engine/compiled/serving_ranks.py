"""A rank of a served load, compiled: its queue, prompts, decodes and blocks, as in `serving.scheduler`."""

from __future__ import annotations

import numpy as np

from moesim.simulator.engine.compiled import state
from moesim.simulator.engine.compiled.memory import Run, Vector, compiled

# -- lists: a queue, prompts under way, sequences that decode ----------------------------------------------


@compiled
def append(run: Run, first: Vector, last: Vector, rank: int, request: int) -> None:
    """A request joins the end of a rank's list."""
    run.next[request] = -1
    run.previous[request] = last[rank]
    if last[rank] < 0:
        first[rank] = request
    else:
        run.next[last[rank]] = request
    last[rank] = request


@compiled
def _remove_prompt(run: Run, rank: int, request: int) -> None:
    before, after = run.previous[request], run.next[request]
    if before < 0:
        run.prompt_first[rank] = after
    else:
        run.next[before] = after
    if after < 0:
        run.prompt_last[rank] = before
    else:
        run.previous[after] = before
    run.prompts[rank] -= 1


@compiled
def _requeue(run: Run, rank: int, request: int) -> None:
    """A preempted request heads the queue."""
    run.previous[request] = -1
    run.next[request] = run.queue_first[rank]
    if run.queue_first[rank] < 0:
        run.queue_last[rank] = request
    else:
        run.previous[run.queue_first[rank]] = request
    run.queue_first[rank] = request
    run.queued[rank] += 1


@compiled
def _ends_before(run: Run, one: int, other: int) -> bool:
    return run.until[one] < run.until[other] or (run.until[one] == run.until[other] and one < other)


@compiled
def _sift_end(run: Run, rank: int, request: int, at: int) -> None:
    """Put a sequence where it belongs in the heap of a rank's ends, from a free place."""
    base, place, count = rank * run.most_ends, run.end_place, run.decodes[rank]
    ends = run.ends
    while at > 0 and _ends_before(run, request, ends[base + ((at - 1) >> 1)]):
        ends[base + at] = ends[base + ((at - 1) >> 1)]
        place[ends[base + at]] = at
        at = (at - 1) >> 1
    while 2 * at + 1 < count:
        child = 2 * at + 1
        if child + 1 < count and _ends_before(run, ends[base + child + 1], ends[base + child]):
            child += 1
        if not _ends_before(run, ends[base + child], request):
            break
        ends[base + at] = ends[base + child]
        place[ends[base + at]] = at
        at = child
    ends[base + at] = request
    place[request] = at


# -- a rank: what its next step works on -------------------------------------------------------------


@compiled
def running(run: Run, rank: int) -> int:
    """Sequences that hold blocks and are worked on."""
    return run.decodes[rank] + run.prompts[rank]


@compiled
def _blocks(run: Run, rank: int, steps: int) -> int:
    """Blocks of everything that a rank works on, after so many more steps of the decodes."""
    gone, size, rest = (run.step[rank] + steps) * run.gain, run.size, 0
    for place in range(size):
        count = run.phase[rank * size + place]
        if count:
            rest += count * ((-gone - place) % size)
    units = run.positions[rank] + steps * run.gain * run.decodes[rank] + rest
    return units // size + run.others[rank]


@compiled
def _fits_for_sure(run: Run, rank: int, steps: int) -> bool:
    if run.capacity < 0:
        return True
    units = run.positions[rank] + run.decodes[rank] * (steps * run.gain + run.size - 1)
    return units // run.size + run.others[rank] <= run.capacity


@compiled
def _fits(run: Run, blocks: int) -> bool:
    return run.capacity < 0 or blocks <= run.capacity


@compiled
def plan_rank(run: Run, rank: int) -> None:
    """The work of a rank's next step."""
    places = run.most - run.ended[rank] if run.ahead else run.most
    kept_all = _fits_for_sure(run, rank, 1) or _secure_decodes(run, rank)
    run.chunks[rank] = 0
    base = rank * state.BATCH
    batch = run.batch
    for n in range(state.BATCH):
        batch[base + n] = 0
    budget = run.tokens - (run.decodes[rank] if run.mixed else 0)
    request = run.prompt_first[rank]
    while request >= 0:
        budget -= _chunk(run, rank, request, budget)
        request = run.next[request]
    while kept_all and run.queued[rank] and running(run, rank) < places:
        request = _admit(run, rank, budget) if budget > 0 else -1
        if request < 0:
            break
        budget -= _chunk(run, rank, request, budget)
    decodes, now = run.decodes[rank], running(run, rank)
    run.decoding[rank] = 1 if run.mixed or run.chunks[rank] == 0 else 0
    run.planned[rank] = 1 if run.chunks[rank] or decodes else 0
    run.ended[rank], run.fresh[rank] = 0, run.fresh_queued[rank]
    more = run.fresh[rank] > 0 or (run.queued[rank] > 0 and places < run.most)
    run.unseen[rank] = 1 if now < run.most and more else 0
    if run.fresh[rank]:
        _join(run, rank)
    run.load[rank] = 4 * run.queued[rank] + now
    if run.decoding[rank]:
        batch[base] = decodes
        batch[base + 1] = run.positions[rank] // run.units + decodes
    batch[base + 2] = run.chunks[rank]


@compiled
def _join(run: Run, rank: int) -> None:
    """What came after the step under way was planned joins the queue."""
    first = run.fresh_first[rank]
    if run.queue_last[rank] < 0:
        run.queue_first[rank] = first
    else:
        run.next[run.queue_last[rank]] = first
    run.previous[first] = run.queue_last[rank]
    run.queue_last[rank] = run.fresh_last[rank]
    run.queued[rank] += run.fresh_queued[rank]
    run.fresh_first[rank] = run.fresh_last[rank] = -1
    run.fresh_queued[rank] = 0


@compiled
def _chunk(run: Run, rank: int, request: int, budget: int) -> int:
    done = run.computed[request]
    count = max(min(run.length[request] - done, budget), 0)
    run.chunk[request] = count
    if count:
        run.chunks[rank] += 1
        run.batch[rank * state.BATCH + 3] += count
        run.batch[rank * state.BATCH + 4] += count * done + count * (count + 1) // 2
    return count


@compiled
def _secure_decodes(run: Run, rank: int) -> bool:
    before = run.preemptions[rank]
    while running(run, rank) > 1 and not _fits(run, _blocks(run, rank, 1)):
        _preempt(run, rank)
    return run.preemptions[rank] == before


@compiled
def _preempt(run: Run, rank: int) -> None:
    """The newest sequence loses its keys and values and heads the queue."""
    run.preemptions[rank] += 1
    if run.prompts[rank]:
        request = run.prompt_last[rank]
        _remove_prompt(run, rank, request)
        run.others[rank] -= run.blocks[request]
        run.generated[request] = run.length[request] - run.inputs[request]
    else:
        request = run.decode_last[rank]
        gained = (run.step[rank] - run.computed[request]) * run.gain // run.units
        _leave(run, rank, request)
        run.generated[request] = run.length[request] + gained + 1 - run.inputs[request]
    _requeue(run, rank, request)


@compiled
def _admit(run: Run, rank: int, budget: int) -> int:
    """The first of the queue, with blocks for its whole prompt; -1 where they are not to be had."""
    request = run.queue_first[rank]
    generated = run.generated[request]
    tokens = run.inputs[request] + generated
    here = 0
    if generated == 0:
        here = max(here, int(run.reals[state.CACHED_SHARE] * tokens))
    here = min(here, tokens - 1)
    if not run.chunked and tokens - here > budget and budget < run.tokens:
        return -1
    outputs, own = run.outputs[request] - generated, -(-tokens // run.block)
    if not _take(run, rank, own, outputs):
        return -1
    run.queue_first[rank] = run.next[request]
    if run.next[request] < 0:
        run.queue_last[rank] = -1
    run.queued[rank] -= 1
    run.cached[rank] += here
    if run.scheduled[request] < 0:
        run.scheduled[request] = run.counters[state.TIME]
    run.computed[request], run.length[request] = here, tokens
    run.owed[request], run.blocks[request] = outputs, own
    append(run, run.prompt_first, run.prompt_last, rank, request)
    run.prompts[rank] += 1
    return request


@compiled
def _take(run: Run, rank: int, own: int, outputs: int) -> bool:
    """Hold a prompt's blocks if they are there beside the next step and what is reserved."""
    new, for_running, owed = run.reals[state.RESERVE_NEW], run.reals[state.RESERVE_RUNNING], 0.0
    if running(run, rank) and (new != 0.0 or for_running != 0.0):
        rest = (run.untils[rank] - run.step[rank] * run.decodes[rank]) * run.gain / run.units
        writing = 0
        request = run.prompt_first[rank]
        while request >= 0:
            writing += run.owed[request]
            request = run.next[request]
        owed = new * outputs + for_running * (rest + writing)
    if run.capacity >= 0:
        needed = _blocks(run, rank, 1) + own + int(np.ceil(owed / run.block))
        if needed > run.capacity:
            return False
    run.others[rank] += own
    run.peak[rank] = max(run.peak[rank], _blocks(run, rank, 0))
    return True


# -- a rank: time goes on ----------------------------------------------------------------------------


@compiled
def horizon(run: Run, rank: int, most: int) -> int:
    """Steps, at most `most`, until anything but lengths changes; 1 where prompts are worked on."""
    if run.chunks[rank]:
        return 1
    if run.decodes[rank] == 0:
        return most
    steps = min(run.until[run.ends[rank * run.most_ends]] - run.step[rank], most)
    if _fits_for_sure(run, rank, steps) or _fits(run, _blocks(run, rank, steps)):
        return steps
    low, high = 1, steps
    while low < high:
        middle = (low + high + 1) // 2
        if _fits(run, _blocks(run, rank, middle)):
            low = middle
        else:
            high = middle - 1
    return low


@compiled
def advance(run: Run, rank: int, steps: int) -> int:
    """The planned step, and `steps - 1` more decodes, are over; how many requests are (in `lasts`)."""
    over = 0
    if run.decoding[rank] and run.decodes[rank]:
        run.positions[rank] += steps * run.gain * run.decodes[rank]
        run.step[rank] += steps
        while run.decodes[rank]:
            request = run.ends[rank * run.most_ends]
            if run.until[request] > run.step[rank]:
                break
            if over == 0:
                run.peak[rank] = max(run.peak[rank], _blocks(run, rank, 0))
            _leave(run, rank, request)
            run.lasts[over] = request
            over += 1
    if run.chunks[rank]:
        request = run.prompt_first[rank]
        while request >= 0:
            after = run.next[request]
            run.computed[request] += run.chunk[request]
            if run.chunk[request] and run.computed[request] == run.length[request]:
                _remove_prompt(run, rank, request)
                over = _begin(run, rank, request, over)
            request = after
        run.chunks[rank] = 0
    run.ended[rank] = over
    run.load[rank] = 4 * (run.queued[rank] + run.fresh_queued[rank]) + running(run, rank)
    run.told[rank] = run.load[rank]
    return over


@compiled
def _begin(run: Run, rank: int, request: int, over: int) -> int:
    """The prompt is done and its next token there: the sequence decodes, or ends; how many have ended."""
    if run.length[request] == run.inputs[request]:
        run.first[request] = run.counters[state.TIME]
        run.rank_of[request] = rank
    if run.owed[request] <= 1:
        run.others[rank] -= run.blocks[request]
        run.lasts[over] = request
        return over + 1
    units, context, step = run.units, run.length[request], run.step[rank]
    run.until[request] = step - (-(run.owed[request] - 1) * units // run.gain)
    run.computed[request] = step  # since when it decodes
    run.positions[rank] += context * units
    run.untils[rank] += run.until[request]
    run.phase[rank * run.size + (context * units - step * run.gain) % run.size] += 1
    run.others[rank] += -context // run.block
    run.previous[request], run.next[request] = run.decode_last[rank], -1
    if run.decode_last[rank] >= 0:
        run.next[run.decode_last[rank]] = request
    run.decode_last[rank] = request
    run.decodes[rank] += 1
    _sift_end(run, rank, request, run.decodes[rank] - 1)
    return over


@compiled
def _leave(run: Run, rank: int, request: int) -> None:
    """A sequence decodes no more: neither its length nor its end count."""
    start, since = run.length[request] * run.units, run.computed[request]
    run.positions[rank] -= start + (run.step[rank] - since) * run.gain
    run.untils[rank] -= run.until[request]
    run.phase[rank * run.size + (start - since * run.gain) % run.size] -= 1
    run.others[rank] -= run.blocks[request] + -start // run.size
    before, after = run.previous[request], run.next[request]
    if before >= 0:
        run.next[before] = after
    if after >= 0:
        run.previous[after] = before
    else:
        run.decode_last[rank] = before
    run.decodes[rank] -= 1
    at, count = run.end_place[request], run.decodes[rank]
    if at < count:
        _sift_end(run, rank, run.ends[rank * run.most_ends + count], at)
