"""Continuous batching: what an engine's next step works on, with paged keys and values (pure state).

Sequences that decode are counted, not listed, so a step costs the same with one of them or a thousand.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from math import ceil
from typing import NamedTuple

import numpy as np
from msgspec import Struct

from moesim.simulator.serving.requests import Requests

# -- prefix cache ------------------------------------------------------------------------------------
# Blocks of prompts that requests share; the least recently used goes first.


class PrefixCache:
    """The blocks of one rank: shared ones by id, in use or idle, and those that belong to sequences alone.

    `capacity`: blocks in all, None for no limit. `weight`: blocks that one shared id stands for. An id stands
    for its tokens and everything before them, as in the hash chains of vLLM and Mooncake, so a request's hits
    are its first ids only. `peak`: most blocks in use.
    """

    def __init__(self, capacity: int | None = None, weight: int = 1) -> None:
        """An empty cache."""
        self.capacity, self.weight = capacity, weight
        self.hits = self.asked = self.evicted = self.peak = 0
        self.shared = 0  # blocks of ids in use
        self._users: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    def fits(self, own: int, ids: list[int] | None = None) -> bool:
        """Whether `own` blocks of sequences alone fit, beside the shared ones in use and those of `ids`."""
        if self.capacity is None:
            return True
        new = sum(one not in self._users for one in ids) * self.weight if ids else 0
        return own + self.shared + new <= self.capacity

    def matched(self, ids: list[int]) -> int:
        """Ids at the start of a prompt that are here."""
        for place, one in enumerate(ids):
            if one not in self._users and one not in self._idle:
                return place
        return len(ids)

    def take(self, ids: list[int], own: int) -> None:
        """Hold a prompt's shared blocks, beside `own` of sequences alone."""
        self.asked += len(ids)
        self.hits += self.matched(ids)
        for one in ids:
            self._idle.pop(one, None)
            self._users[one] = self._users.get(one, 0) + 1
        self.shared = len(self._users) * self.weight
        self.hold(own)

    def release(self, ids: list[int]) -> None:
        """Let go of a prompt's blocks, its last first, as the start of a prompt is shared most."""
        for one in reversed(ids):
            left = self._users[one] - 1
            if left:
                self._users[one] = left
            else:
                del self._users[one]
                self._idle[one] = None
        self.shared = len(self._users) * self.weight

    def hold(self, own: int) -> None:
        """Sequences alone have `own` blocks; idle shared ones that were used longest ago make room."""
        used = self.shared + own
        self.peak = max(self.peak, used)
        if self.capacity is None:
            return
        while self._idle and len(self._idle) * self.weight > self.capacity - used:
            self._idle.popitem(last=False)
            self.evicted += 1


class Policy(Struct, frozen=True):
    """Limits and habits of an engine's scheduler, by the names of vLLM.

    `kv_blocks`: blocks of `block_tokens` tokens on one rank, None for no limit. `mixed`: a step has prefills
    beside decodes (vLLM, TensorRT-LLM; SGLang with `--enable-mixed-chunk`), else prefills go first and alone.
    `chunked`: a prompt may be cut, else a step takes whole prompts. `gain`: tokens that a sequence gains in a
    decode step, above 1 with accepted drafts (mean). `reserve_new`, `reserve_running`: share of the tokens
    that a request has yet to write for which its admission finds blocks, and for which it leaves some to
    those that run: vLLM 0 and 0, TensorRT-LLM without eviction 1 and 1. `ahead`: a step is planned when the
    one before it begins (vLLM's asynchronous scheduling, SGLang's overlap schedule), so that arrivals, and
    places of sequences that end, count one step later. `prompts_only`: a pool that hands sequences over after
    the first token; their blocks stay until `let_go`. `wait_steps`: decode steps between looks at new
    requests (SGLang's scheduler-recv-interval); with `wait_for_ranks` the most that they wait for every rank
    to have one (TensorRT-LLM's attention_dp_config with enable_balance and timeout_iters). `sends_chunks`: a
    pool for prompts sends each chunk when it is computed (SGLang), else whole prompts.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    block_tokens: int = 16
    kv_blocks: int | None = None
    mixed: bool = True
    chunked: bool = True
    prefix_caching: bool = True
    gain: float = 1.0
    reserve_new: float = 0.0
    reserve_running: float = 0.0
    ahead: bool = False
    prompts_only: bool = False
    wait_steps: int = 0
    wait_for_ranks: bool = False
    sends_chunks: bool = False


class StepBatch(NamedTuple):
    """The work of one step on one rank.

    `decodes`: sequences that decode; `context`: keys that they see in all; `prefill_tokens` of `prefills`
    prompts, which see `prefill_pairs` keys in all (a token sees itself and what stands before it).
    """

    decodes: int
    context: int
    prefills: int
    prefill_tokens: int
    prefill_pairs: int


IDLE = StepBatch(0, 0, 0, 0, 0)


class Done(NamedTuple):
    """What steps finished: requests with their first token, with their last, and those for another pool."""

    first: list[int]
    last: list[int]
    handed: list[int]


class Waiting(NamedTuple):
    """A request in the queue: tokens that it has got, and whether another pool brings its keys and values."""

    request: int
    generated: int = 0
    ready: bool = False


class _Prefill(Struct):
    request: int
    done: int
    tokens: int
    outputs: int
    blocks: int
    ids: list[int]


class _Decode(Struct):
    context: int
    since: int
    until: int
    blocks: int
    ids: list[int]


UNITS = 64
"""Parts of a token in which positions are counted where a step gains a fraction of one."""


class Scheduler:
    """One rank's queue, running sequences and blocks."""

    def __init__(self, policy: Policy, requests: Requests) -> None:
        """An idle rank."""
        self.policy, self._requests = policy, requests
        self.cache = PrefixCache(policy.kv_blocks, max(requests.block_tokens // policy.block_tokens, 1))
        self._shared = bool(requests.block_tokens) and policy.prefix_caching
        self.waiting: deque[Waiting] = deque()
        self._incoming: list[Waiting] = []
        self._fresh = 0  # of those that wait, came after the step under way was planned
        self._ended = 0  # in the last step; they keep their places for one more where steps are planned ahead
        self.load = 0  # waiting sequences count four times (vLLM's balancer of data-parallel engines)
        self.planned = False  # whether the planned step works on anything
        self.unseen = False  # whether the next plan sees requests or places that this one does not
        self.cached_tokens = self.preemptions = 0
        self.scheduled: list[int] = []
        self._step = 0
        self._prefills: list[_Prefill] = []
        self._handing: dict[int, _Prefill] = {}
        self._decoding: OrderedDict[int, _Decode] = OrderedDict()
        self._ends: list[tuple[int, int]] = []
        self._chunks: list[tuple[_Prefill, int]] = []
        self._decodes = True
        # Positions are in parts of a token; `_phase` counts sequences by their place in a block at step 0.
        self._units = 1 if policy.gain == 1 else UNITS
        self._gain = round(policy.gain * self._units)
        self._context = 0
        self._until = 0  # sum over decoding sequences
        self._size = policy.block_tokens * self._units
        self._phase = np.zeros(self._size, dtype=np.int64)
        self._places = np.arange(self._size)
        self._others = (
            0  # blocks of prompts, and what decoding sequences hold beside those of their positions
        )

    @property
    def running(self) -> int:
        """Sequences that hold blocks and are worked on."""
        return len(self._decoding) + len(self._prefills)

    @property
    def chunks(self) -> list[tuple[int, int]]:
        """Requests and tokens of the prompts that the planned step works on."""
        return [(prefill.request, count) for prefill, count in self._chunks]

    @property
    def parts(self) -> list[tuple[int, int]]:
        """Requests whose prompts go on after the planned step, and tokens that are computed by then."""
        reached = [(prefill, prefill.done + count) for prefill, count in self._chunks]
        return [(prefill.request, done) for prefill, done in reached if done < prefill.tokens]

    @property
    def queued(self) -> int:
        """Requests that wait."""
        return len(self.waiting) + len(self._incoming)

    @property
    def counts(self) -> tuple[int, int]:
        """(running, waiting) as engines report them: what the next step has been planned for runs."""
        fresh = self._fresh if len(self.waiting) == self._fresh else 0
        begun = min(fresh, self.policy.max_num_seqs - self.running)
        return self.running + begun, len(self.waiting) - begun

    @property
    def busy(self) -> bool:
        """Whether there is anything to do."""
        return bool(self._decoding or self._prefills or self.queued)

    def add(self, request: int, generated: int = 0, ready: bool = False, amid: bool = False) -> None:
        """A request joins the queue, with tokens, and perhaps keys and values, of another pool.

        `amid`: a step is under way, and perhaps the next one is planned already.
        """
        queue = self._incoming if amid and self.policy.ahead else self.waiting
        queue.append(Waiting(request, generated, ready))
        self.load += 4

    def matched_tokens(self, request: int) -> int:
        """Tokens of a request's prompt that are in the prefix cache."""
        if not self._shared:
            return 0
        return self.cache.matched(self._requests.block_ids(request)) * self._requests.block_tokens

    def let_go(self, request: int) -> None:
        """The keys and values of a sequence that was handed over are no longer needed here."""
        self._release(self._handing.pop(request))

    def _release(self, prefill: _Prefill) -> None:
        self._others -= prefill.blocks
        self.cache.release(prefill.ids)

    # -- a step: what it works on -----------------------------------------------------------------

    def plan(self) -> StepBatch:
        """The work of the next step; it stays planned until `advance`."""
        self._chunks, self.scheduled = [], []
        most = self.policy.max_num_seqs
        places = most - self._ended if self.policy.ahead else most
        kept_all = self._fits_for_sure(1) or self._secure_decodes()
        budget = self.policy.max_num_batched_tokens - (len(self._decoding) if self.policy.mixed else 0)
        for prefill in self._prefills:
            budget -= self._chunk(prefill, budget)
        while kept_all and self.waiting and self.running < places:
            if self.waiting[0].ready:
                if not self._take_over():
                    break
                continue
            admitted = self._admit(budget) if budget > 0 else None
            if admitted is None:
                break
            budget -= self._chunk(admitted, budget)
        decodes = len(self._decoding)
        running = decodes + len(self._prefills)
        self._decodes = self.policy.mixed or not self._chunks
        self.planned = bool(self._chunks or decodes)
        self._ended, self._fresh = 0, len(self._incoming)
        self.unseen = running < most and bool(self._fresh or (self.waiting and places < most))
        if self._fresh:
            self.waiting.extend(self._incoming)
            self._incoming.clear()
        self.load = 4 * len(self.waiting) + running
        if not self._chunks:
            return StepBatch(decodes, self._context // self._units + decodes, 0, 0, 0)
        tokens = sum(count for _, count in self._chunks)
        pairs = sum(count * each.done + count * (count + 1) // 2 for each, count in self._chunks)
        if not self._decodes:
            return StepBatch(0, 0, len(self._chunks), tokens, pairs)
        context = self._context // self._units + decodes  # each sees the token it brings
        return StepBatch(decodes, context, len(self._chunks), tokens, pairs)

    def _chunk(self, prefill: _Prefill, budget: int) -> int:
        count = min(prefill.tokens - prefill.done, budget)
        if count > 0:
            self._chunks.append((prefill, count))
        return max(count, 0)

    def _fits_for_sure(self, steps: int) -> bool:
        """Whether decodes of so many steps find blocks even if each sequence has just begun one."""
        cache = self.cache
        if cache.capacity is None:
            return True
        decodes = len(self._decoding)
        units = self._context + decodes * (steps * self._gain + self._size - 1)
        return units // self._size + self._others <= cache.capacity - cache.shared

    def _blocks(self, steps: int) -> int:
        """Blocks of everything that this rank works on, after so many more steps of the decodes."""
        gone = (self._step + steps) * self._gain
        rest = int(self._phase @ ((-gone - self._places) % self._size))  # up to the ends of their last blocks
        units = self._context + steps * self._gain * len(self._decoding) + rest
        return units // self._size + self._others

    def _secure_decodes(self) -> bool:
        """Whether all find blocks for the tokens that they add; else the newest give theirs up."""
        before = self.preemptions
        while self.running > 1 and not self.cache.fits(self._blocks(1)):
            self._preempt()
        return self.preemptions == before

    def _admit(self, budget: int) -> _Prefill | None:
        """The first of the queue, with blocks for its whole prompt; None where they are not to be had."""
        request, generated, _ = self.waiting[0]
        tokens = int(self._requests.input_tokens[request]) + generated
        ids = self._requests.block_ids(request) if self._shared else []
        if ids:
            self.cache.hold(self._blocks(0))
        here = self.cache.matched(ids) * self._requests.block_tokens
        if not generated:  # keys and values that a preempted sequence lost are computed
            here = max(here, int(self._requests.cached_share * tokens))
        here = min(here, tokens - 1)
        if not self.policy.chunked and tokens - here > budget < self.policy.max_num_batched_tokens:
            return None
        outputs = int(self._requests.output_tokens[request]) - generated
        own = max(-(-tokens // self.policy.block_tokens) - len(ids) * self.cache.weight, 0)
        if not self._take(ids, own, outputs):
            return None
        self.waiting.popleft()
        self.cached_tokens += here
        self.scheduled.append(request)
        prefill = _Prefill(request, here, tokens, outputs, own, ids)
        self._prefills.append(prefill)
        return prefill

    def _take(self, ids: list[int], own: int, outputs: int) -> bool:
        """Hold a prompt's blocks if they are there beside the next step and what is reserved."""
        policy, cache = self.policy, self.cache
        owed = 0.0
        if self.running and (policy.reserve_new or policy.reserve_running):
            rest = (self._until - self._step * len(self._decoding)) * self._gain / self._units
            rest += sum(each.outputs for each in self._prefills)
            owed = policy.reserve_new * outputs + policy.reserve_running * rest
        if not cache.fits(self._blocks(1) + own + ceil(owed / policy.block_tokens), ids):
            return False
        self._others += own
        cache.take(ids, self._blocks(0))
        return True

    def _take_over(self) -> bool:
        """The first of the queue, whose keys and values are here, decodes; False where it does not fit."""
        request, generated, _ = self.waiting[0]
        tokens = int(self._requests.input_tokens[request]) + generated - 1
        outputs = int(self._requests.output_tokens[request]) - generated
        own = -(-tokens // self.policy.block_tokens)
        if not self._take([], own, outputs):
            return False
        self.waiting.popleft()
        self._decode(request, tokens, outputs, own, [])
        return True

    def _preempt(self) -> None:
        """The newest sequence loses its keys and values and heads the queue (vLLM's recompute)."""
        self.preemptions += 1
        if self._prefills:
            lost = self._prefills.pop()
            generated = lost.tokens - int(self._requests.input_tokens[lost.request])
            self._release(lost)
            self.waiting.appendleft(Waiting(lost.request, generated))
            return
        request, gone = self._decoding.popitem()
        gained = (self._step - gone.since) * self._gain // self._units
        self._leave(gone)
        generated = gone.context + gained + 1 - int(self._requests.input_tokens[request])
        self.waiting.appendleft(Waiting(request, generated))

    # -- time goes on -----------------------------------------------------------------------------

    def horizon(self, most: int) -> int:
        """Steps, at most `most`, until anything but lengths changes; 1 where prompts are worked on."""
        if self._chunks:
            return 1
        while self._ends and self._stale(self._ends[0]):
            heapq.heappop(self._ends)
        if not self._ends:
            return most
        steps = min(self._ends[0][0] - self._step, most)
        if self._fits_for_sure(steps) or self.cache.fits(self._blocks(steps)):
            return steps
        low, high = 1, steps  # blocks grow with steps: the most steps whose blocks are there
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.cache.fits(self._blocks(middle)) else (low, middle - 1)
        return low

    def _stale(self, end: tuple[int, int]) -> bool:
        decode = self._decoding.get(end[1])
        return decode is None or decode.until != end[0]

    def advance(self, steps: int) -> Done:
        """The planned step, and `steps - 1` more of the same decodes, are over."""
        done = Done([], [], [])
        if self._decodes and self._decoding:
            self._context += steps * self._gain * len(self._decoding)
            self._step += steps
            self._finish(done.last)
        for prefill, count in self._chunks:
            prefill.done += count
            if prefill.done == prefill.tokens:
                self._prefills.remove(prefill)
                self._begin(prefill, done)
        self._chunks = []
        self._ended = len(done.last)
        self.load = 4 * self.queued + self.running
        return done

    def _finish(self, last: list[int]) -> None:
        while self._ends and self._ends[0][0] <= self._step:
            end = heapq.heappop(self._ends)
            if self._stale(end):
                continue
            if not last:
                self.cache.hold(self._blocks(0))
            self._leave(self._decoding.pop(end[1]))
            last.append(end[1])

    def _leave(self, decode: _Decode) -> None:
        start = decode.context * self._units
        self._context -= start + (self._step - decode.since) * self._gain
        self._until -= decode.until
        self._phase[(start - decode.since * self._gain) % self._size] -= 1
        self._others -= decode.blocks + -start // self._size
        self.cache.release(decode.ids)

    def _begin(self, prefill: _Prefill, done: Done) -> None:
        """The prompt is done, its next token is there: the sequence decodes, is handed over, or ends."""
        if prefill.tokens == self._requests.input_tokens[prefill.request]:
            done.first.append(prefill.request)
        if prefill.outputs <= 1:
            self._release(prefill)
            done.last.append(prefill.request)
        elif self.policy.prompts_only:
            self._handing[prefill.request] = prefill
            done.handed.append(prefill.request)
        else:
            self._decode(prefill.request, prefill.tokens, prefill.outputs - 1, prefill.blocks, prefill.ids)

    def _decode(self, request: int, context: int, outputs: int, blocks: int, ids: list[int]) -> None:
        """A sequence of `context` tokens in the cache decodes `outputs` more."""
        until = self._step - (-outputs * self._units // self._gain)
        self._decoding[request] = _Decode(context, self._step, until, blocks, ids)
        self._context += context * self._units
        self._until += until
        self._phase[(context * self._units - self._step * self._gain) % self._size] += 1
        self._others += -context // self.policy.block_tokens
        heapq.heappush(self._ends, (until, request))
