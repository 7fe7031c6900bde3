"""Continuous batching: which requests an engine's next step works on, with paged keys and values (pure state).

Sequences that decode are counted, not listed, so a step costs the same with one of them or a thousand.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import NamedTuple

from moesim.simulator.serving.prefix_cache import PrefixCache
from moesim.simulator.serving.requests import Requests


@dataclass(frozen=True, slots=True)
class Policy:
    """Limits and habits of an engine's scheduler, by the names of vLLM.

    `kv_blocks`: blocks of `block_tokens` tokens on one rank, None for no limit. `mixed`: a step has prefills beside
    decodes (vLLM, TensorRT-LLM; SGLang with `--enable-mixed-chunk`), else prefills go first and alone.
    `chunked`: a prompt may be cut, else a step takes whole prompts. `tokens_per_step`: tokens that a sequence gains
    in a decode step, above 1 with accepted drafts.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    block_tokens: int = 16
    kv_blocks: int | None = None
    mixed: bool = True
    chunked: bool = True
    prefix_caching: bool = True
    tokens_per_step: int = 1


class Batch(NamedTuple):
    """The work of one step on one rank.

    `decodes`: sequences that decode; `context`: keys that they see in all; `prefill_tokens` of `prefills` prompts,
    which see `prefill_pairs` keys in all (a token sees itself and what stands before it).
    """

    decodes: int
    context: int
    prefills: int
    prefill_tokens: int
    prefill_pairs: int


IDLE = Batch(0, 0, 0, 0, 0)


class Done(NamedTuple):
    """What a stretch of steps finished: requests with their first token (at its only step) and with their last."""

    first: list[int]
    last: list[int]


@dataclass(slots=True)
class _Prefill:
    request: int
    done: int
    tokens: int
    outputs: int
    blocks: int
    ids: list[int]


@dataclass(slots=True)
class _Decode:
    context: int
    since: int
    until: int
    blocks: int
    ids: list[int]


class Scheduler:
    """One rank's queue, running sequences and blocks."""

    def __init__(self, policy: Policy, requests: Requests) -> None:
        self.policy, self._requests = policy, requests
        per = max(requests.block_tokens // policy.block_tokens, 1)
        self.cache = PrefixCache(policy.kv_blocks, per)
        self._shared = bool(requests.block_tokens) and policy.prefix_caching
        self.waiting: deque[tuple[int, int]] = deque()  # request, tokens that it has got already
        self.cached_tokens = self.preemptions = 0
        self.scheduled: list[int] = []
        self._step = 0
        self._prefills: list[_Prefill] = []
        self._decoding: OrderedDict[int, _Decode] = OrderedDict()
        self._ends: list[tuple[int, int]] = []
        self._context = 0
        self._full = [0] * policy.block_tokens  # sequences by the step, modulo, at which they need a block
        self._chunks: list[tuple[_Prefill, int]] = []
        self._decodes = True

    @property
    def running(self) -> int:
        """Sequences that hold blocks."""
        return len(self._decoding) + len(self._prefills)

    @property
    def planned(self) -> bool:
        """Whether the planned step works on anything."""
        return bool(self._chunks or self._decoding)

    @property
    def busy(self) -> bool:
        """Whether there is anything to do."""
        return bool(self._decoding or self._prefills or self.waiting)

    def add(self, request: int, generated: int = 0) -> None:
        """A request joins the queue; with `generated` tokens where another rank has begun it."""
        self.waiting.append((request, generated))

    # -- a step: what it works on -----------------------------------------------------------------

    def plan(self) -> Batch:
        """The work of the next step; it stays planned until `advance`."""
        self._chunks, self.scheduled = [], []
        if self.cache.capacity is not None:
            self._secure_decodes()
        budget = self.policy.max_num_batched_tokens - (len(self._decoding) if self.policy.mixed else 0)
        for prefill in self._prefills:
            budget -= self._chunk(prefill, budget)
        while self.waiting and budget > 0 and self.running < self.policy.max_num_seqs:
            admitted = self._admit(budget)
            if admitted is None:
                break
            budget -= self._chunk(admitted, budget)
        self._decodes = self.policy.mixed or not self._chunks
        if not self._chunks:
            return Batch(len(self._decoding), self._context + len(self._decoding), 0, 0, 0)
        tokens = sum(count for _, count in self._chunks)
        pairs = sum(count * each.done + count * (count + 1) // 2 for each, count in self._chunks)
        if not self._decodes:
            return Batch(0, 0, len(self._chunks), tokens, pairs)
        context = self._context + len(self._decoding)  # each sees the token it brings
        return Batch(len(self._decoding), context, len(self._chunks), tokens, pairs)

    def _chunk(self, prefill: _Prefill, budget: int) -> int:
        count = min(prefill.tokens - prefill.done, budget)
        if count > 0:
            self._chunks.append((prefill, count))
        return count

    def _secure_decodes(self) -> None:
        """Blocks for the tokens that the running sequences add; where none are left the newest gives its up."""
        while not self.cache.fits(self._needed()):
            if len(self._decoding) + len(self._prefills) <= 1:
                break
            self._preempt()

    def _needed(self) -> int:
        return self._full[-self._step % self.policy.block_tokens]

    def _admit(self, budget: int) -> _Prefill | None:
        """The first of the queue with blocks for its whole prompt, or None where they are not to be had."""
        request, generated = self.waiting[0]
        tokens = int(self._requests.input_tokens[request]) + generated
        ids = self._requests.block_ids(request) if self._shared else []
        here = min(self.cache.matched(ids) * self._requests.block_tokens, tokens - 1)
        if not self.policy.chunked and tokens - here > budget < self.policy.max_num_batched_tokens:
            return None
        own = -(-tokens // self.policy.block_tokens) - len(ids) * self.cache.weight
        if not self.cache.take(ids, max(own, 0)):
            return None
        self.waiting.popleft()
        self.cached_tokens += here
        self.scheduled.append(request)
        outputs = int(self._requests.output_tokens[request]) - generated
        prefill = _Prefill(request, here, tokens, outputs, max(own, 0), ids)
        self._prefills.append(prefill)
        return prefill

    def _preempt(self) -> None:
        """The newest sequence goes back to the head of the queue and loses its keys and values (vLLM's recompute)."""
        self.preemptions += 1
        if self._prefills:
            lost = self._prefills.pop()
            generated = lost.tokens - int(self._requests.input_tokens[lost.request])
            self.cache.release(lost.ids, lost.blocks)
            self.waiting.appendleft((lost.request, generated))
            return
        request, gone = self._decoding.popitem()
        steps = self._step - gone.since
        self._leave(gone)
        generated = gone.context + steps + 1 - int(self._requests.input_tokens[request])
        self.waiting.appendleft((request, generated))

    # -- time goes on -----------------------------------------------------------------------------

    def horizon(self, most: int) -> int:
        """Steps, at most `most`, until anything but the lengths of sequences changes; 1 where prompts are worked on."""
        if self._chunks:
            return 1
        while self._ends and self._stale(self._ends[0]):
            heapq.heappop(self._ends)
        if not self._ends:
            return most
        steps = min(self._ends[0][0] - self._step, most)
        free = self.cache.free
        if free is None or free > len(self._decoding) * (steps // self.policy.block_tokens + 1):
            return steps
        for step in range(steps):
            free -= self._full[-(self._step + step) % self.policy.block_tokens]
            if free < 0:
                return max(step, 1)
        return steps

    def _stale(self, end: tuple[int, int]) -> bool:
        decode = self._decoding.get(end[1])
        return decode is None or decode.until != end[0]

    def advance(self, steps: int) -> Done:
        """The planned step, and `steps - 1` more of the same decodes, are over."""
        first: list[int] = []
        last: list[int] = []
        if self._decodes and self._decoding:
            self._grow(steps)
            self._step += steps
            self._finish(last)
        for prefill, count in self._chunks:
            prefill.done += count
            if prefill.done == prefill.tokens:
                self._prefills.remove(prefill)
                self._begin(prefill, first, last)
        self._chunks = []
        return Done(first, last)

    def _grow(self, steps: int) -> None:
        size = self.policy.block_tokens
        whole, rest = divmod(steps, size)
        blocks = whole * len(self._decoding)
        if rest:
            start = -self._step % size
            turned = self._full[start::-1] + self._full[:start:-1]  # from this step's residue downwards
            blocks += sum(turned[:rest])
        self.cache.grow(blocks)
        self._context += steps * len(self._decoding)

    def _finish(self, last: list[int]) -> None:
        while self._ends and self._ends[0][0] <= self._step:
            end = heapq.heappop(self._ends)
            if self._stale(end):
                continue
            self._leave(self._decoding.pop(end[1]))
            last.append(end[1])

    def _leave(self, decode: _Decode) -> None:
        steps = self._step - decode.since
        self._context -= decode.context + steps
        self._full[(decode.context - decode.since) % self.policy.block_tokens] -= 1
        size = self.policy.block_tokens
        grown = -(-(decode.context + steps) // size) - -(-decode.context // size)
        self.cache.release(decode.ids, decode.blocks + grown)

    def _begin(self, prefill: _Prefill, first: list[int], last: list[int]) -> None:
        """The prompt is done and its next token is there: the sequence decodes, or ends."""
        if prefill.tokens == self._requests.input_tokens[prefill.request]:
            first.append(prefill.request)
        if prefill.outputs <= 1:
            self.cache.release(prefill.ids, prefill.blocks)
            last.append(prefill.request)
            return
        until = self._step + prefill.outputs - 1
        decode = _Decode(prefill.tokens, self._step, until, prefill.blocks, prefill.ids)
        self._decoding[prefill.request] = decode
        self._context += prefill.tokens
        self._full[(prefill.tokens - self._step) % self.policy.block_tokens] += 1
        heapq.heappush(self._ends, (until, prefill.request))
