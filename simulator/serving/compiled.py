"""Requests through replicas in compiled code: what it serves, its arrays, and the tables of the step model.

`serve_compiled` gives what `replicas.serve_requests` gives by SimPy, to the nanosecond.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

import numpy as np

from moesim.hwmodels.arrays import FloatArray, IntArray
from moesim.simulator.engine.compiled import state
from moesim.simulator.engine.compiled.state import SERVING_LAYOUT, ServingArrays, ServingSizes, address_of
from moesim.simulator.serving.replicas import (
    PREFIX_AWARE,
    ROUND_ROBIN,
    Count,
    PaceModel,
    PoolLog,
    ReplicaPool,
    Served,
    StepPace,
)
from moesim.simulator.serving.requests import Requests
from moesim.simulator.serving.scheduler import UNITS, StepBatch
from moesim.simulator.serving.step import QuickTables, StepModel
from moesim.simulator.serving.terms import GRID, Total
from moesim.simulator.serving.typical import Stretched

MOST_ENDS = 20_000_000
"""Most places of sequences on all ranks together: 160 MB."""
RATIOS = 128


def why_not(requests: Requests, pool: ReplicaPool, route: str) -> str:
    """What of a load the compiled code does not serve, in words; empty where it serves all of it."""
    policy = pool.policy
    if requests.block_tokens and (policy.prefix_caching or route == PREFIX_AWARE):
        return "its requests share prefixes"
    if policy.wait_steps > 1 or policy.wait_for_ranks or policy.prompts_only:
        return "its engine waits before it looks at requests"
    if pool.replicas * pool.ranks * min(policy.max_num_seqs, len(requests)) > MOST_ENDS:
        return "it has too many places for sequences"
    return ""


class _Tables:
    """The tables of a step model as arrays, filled as the model fills its own."""

    def __init__(self, times: PaceModel, arrays: ServingArrays) -> None:
        self._ratios = times if isinstance(times, Stretched) else None
        self._tables = _quick(times)
        self._arrays, self._known = arrays, dict[int, int]()
        arrays.ratios[:] = 1.0 if self._ratios is None else np.nan
        for name in ("exact", "whole", "logits", "decode_plane", "prompt_plane", "core_launches"):
            getattr(arrays, name)[:] = np.nan
            if hasattr(arrays, f"{name}_launches"):
                getattr(arrays, f"{name}_launches")[:] = np.nan

    def update(self) -> None:
        """Copy what the model has priced since the last time."""
        tables, arrays, size = self._tables, self._arrays, len(GRID)
        if tables is None:
            return
        for rows, price in self._new(tables.whole[False].exact_points):
            place = int(np.searchsorted(arrays.bucket_rows, rows))
            arrays.exact[place], arrays.exact_launches[place] = price.seconds, price.launches
        for base, row in ((0, tables.whole[False]), (size, tables.whole[True])):
            for place, price in self._new(row.points):
                arrays.whole[base + place] = price.seconds
                arrays.whole_launches[base + place] = price.launches
        for place, price in self._new(tables.logits.points):
            arrays.logits[place], arrays.logits_launches[place] = price.seconds, price.launches
        for plane, array in ((tables.decodes, arrays.decode_plane), (tables.prompts, arrays.prompt_plane)):
            for (i, j), price in self._new(plane.points):
                array[i * size + j] = price.seconds
        for (decodes, prompts), launches in tables.core_launches.items():
            arrays.core_launches[decodes + 2 * prompts] = launches
        if self._ratios is not None:
            for (prompts, most), ratio in self._ratios.ratios.items():
                arrays.ratios[most + 64 * prompts] = ratio

    def _new(self, points: Mapping[Any, Total]) -> list[tuple[Any, Total]]:
        """Entries of a table that were not there the last time; tables only grow."""
        known = self._known.get(id(points), 0)
        self._known[id(points)] = len(points)
        return list(islice(points.items(), known, None)) if len(points) > known else []


def serve_compiled(
    serve: Callable[[int], int],
    requests: Requests,
    pool: ReplicaPool,
    route: str,
    sample_ns: int,
    most_samples: int,
    concurrency: int | None,
) -> tuple[Served, int]:
    """(what became of a load, how many requests were left) from the compiled code `serve`.

    The load is one for which `why_not` is empty; the arguments are those of `replicas.serve_requests`.
    """
    arrays = _arrays(requests, pool, route, sample_ns, concurrency)
    tables, counters = _Tables(pool.times, arrays), arrays.counters
    tables.update()
    table = SERVING_LAYOUT.addresses(arrays)
    address, counts, ranks = address_of(table), list[Count](), pool.ranks
    while reason := serve(address):
        if reason == state.WANTS_PACE:
            replica = int(counters[state.AT])
            rows = arrays.batch.reshape(-1, state.BATCH)[replica * ranks : (replica + 1) * ranks].tolist()
            pace = pool.times.pace(int(counters[state.TIME]), [StepBatch(*row) for row in rows])
            _write_pace(arrays, replica, pace)
            tables.update()
            counters[state.RESUMED] = replica
        elif reason == state.WANTS_SAMPLE:
            names = (state.TIME, state.RUNNING, state.WAITING, state.DECODING, state.FULLEST)
            counts.append(Count(*(int(counters[n]) for n in names)))
            if len(counts) >= most_samples:
                del counts[::2]
                counters[state.EVERY] *= 2
            counters[state.RESUMED] = state.SAMPLED
    log = PoolLog(
        int(arrays.all_steps.sum()), int(arrays.busy.sum()), int(arrays.preemptions.sum()),
        int(arrays.cached.sum()), int(arrays.peak.max()),
    )  # fmt: skip
    none = np.full(len(requests), -1, dtype=np.int64)
    served = Served(
        requests, arrays.arrival, arrays.scheduled, arrays.first, arrays.last, none, arrays.rank_of,
        none.copy(), [log], counts,
    )  # fmt: skip
    return served, int(counters[state.LEFT])


def _write_pace(arrays: ServingArrays, replica: int, pace: StepPace) -> None:
    arrays.pace_first[replica], arrays.pace_growth[replica] = pace.first_ns, pace.growth_ns
    arrays.pace_steps[replica] = pace.steps


def _quick(times: PaceModel) -> QuickTables | None:
    """The tables behind a pool's step times, where compiled code reads them."""
    model = times.model if isinstance(times, Stretched) else times
    return model.quick_tables() if type(model) is StepModel else None


def _arrays(
    requests: Requests, pool: ReplicaPool, route: str, sample_ns: int, concurrency: int | None
) -> ServingArrays:
    """The state before the first event."""
    policy, count, ranks = pool.policy, len(requests), pool.replicas * pool.ranks
    tables = _quick(pool.times)
    buckets = tables.buckets if tables else ()
    units = 1 if policy.gain == 1 else UNITS
    sizes = ServingSizes(
        replicas=pool.replicas, ranks=pool.ranks, requests=count, most=policy.max_num_seqs,
        tokens=policy.max_num_batched_tokens, block=policy.block_tokens,
        capacity=-1 if policy.kv_blocks is None else policy.kv_blocks, mixed=policy.mixed,
        chunked=policy.chunked, ahead=policy.ahead, units=units, gain=round(policy.gain * units),
        size=policy.block_tokens * units, most_ends=min(policy.max_num_seqs, count),
        by_load=route != ROUND_ROBIN, closed=concurrency or 0, tabulated=tables is not None,
        graph_prefill=tables.graph_prefill if tables else -1, buckets=len(buckets), points=len(GRID),
    )  # fmt: skip
    given: dict[str, Any] = {
        "sizes": np.array(sizes, dtype=np.int64),
        "reals": np.array([
            policy.reserve_new, policy.reserve_running, requests.cached_share,
            *((tables.exposed_s, tables.host_s, tables.launch_s) if tables else (0.0, 0.0, 0.0)),
        ]),
        "arrival": requests.arrival_ns.copy(),
        "inputs": np.ascontiguousarray(requests.input_tokens),
        "outputs": np.ascontiguousarray(requests.output_tokens),
        "points_at": np.array(GRID),
        "bucket_rows": np.array(buckets, dtype=np.int64),
    }  # fmt: skip
    if concurrency is not None:
        given["arrival"][:concurrency] = 0
    lengths = {
        **dict.fromkeys(_OF_REQUESTS, count), **dict.fromkeys(_OF_RANKS, ranks),
        **dict.fromkeys(_OF_REPLICAS, pool.replicas), **dict.fromkeys(_OF_EVENTS, 2 * pool.replicas + 2),
        "counters": 15, "phase": ranks * sizes.size, "ends": ranks * sizes.most_ends,
        "batch": ranks * state.BATCH, "lasts": sizes.most_ends + 1, "exact": len(buckets),
        "whole": 2 * len(GRID), "logits": len(GRID), "decode_plane": len(GRID)**2,
        "prompt_plane": len(GRID)**2, "core_launches": 4, "ratios": RATIOS,
    }  # fmt: skip
    lengths |= {f"{name}_launches": lengths[name] for name in ("exact", "whole", "logits")}
    fields: dict[str, Any] = {
        name: given[name] if name in given else _empty(name, lengths[name]) for name in ServingArrays._fields
    }
    arrays = ServingArrays(**fields)
    _begin(arrays, pool.replicas, sample_ns, count, concurrency)
    return arrays


_OF_REQUESTS = (
    "scheduled", "first", "last", "rank_of", "generated", "next", "previous", "computed", "length", "owed",
    "blocks", "chunk", "until", "end_place",
)  # fmt: skip
_OF_RANKS = (
    "queue_first", "queue_last", "queued", "fresh_first", "fresh_last", "fresh_queued", "prompt_first",
    "prompt_last", "prompts", "decode_last", "decodes", "fresh", "ended", "load", "told", "planned", "unseen",
    "decoding", "chunks", "cached", "preemptions", "step", "positions", "untils", "others", "peak",
)  # fmt: skip
_OF_REPLICAS = (
    "begun", "steps", "stretch", "asleep", "stepping", "all_steps", "busy", "pace_first", "pace_growth",
    "pace_steps",
)  # fmt: skip
_OF_EVENTS = ("event_time", "event_order", "event_place", "heap")
_NONE_YET = frozenset((
    "scheduled", "first", "last", "rank_of", "next", "previous", "queue_first", "queue_last", "fresh_first",
    "fresh_last", "prompt_first", "prompt_last", "decode_last", "event_place",
))  # fmt: skip


def _empty(name: str, length: int) -> IntArray | FloatArray:
    if name in SERVING_LAYOUT.floats:
        return np.zeros(length)
    return np.full(length, -1 if name in _NONE_YET else 0, dtype=np.int64)


def _begin(arrays: ServingArrays, replicas: int, sample_ns: int, count: int, concurrency: int | None) -> None:
    """Events of the first moment, in SimPy's order: replicas, arrivals, samples."""
    events = 2 * replicas + 2
    first = [*range(replicas), 2 * replicas, *([2 * replicas + 1] if sample_ns else [])]
    for place, event in enumerate(first):
        arrays.event_order[event] = arrays.event_place[event] = place
        arrays.heap[place] = event
    counters = arrays.counters
    counters[state.ORDER], counters[state.IN_HEAP], counters[state.LEFT] = events, len(first), count
    counters[state.TURN] = counters[state.RESUMED] = -1
    counters[state.EVERY] = sample_ns
    counters[state.NEXT_CLOSED] = min(concurrency or 0, count)
