"""Low-latency and two-hop paths on GPUs against the NumPy references; skipped with a reason elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import kernel_references as ref
import numpy as np
import pytest
from gpu_ranks import POISON, check_sum, fails, make_group
from kernel_references import bf16_rows, routing

from moesim.hwmodels.errors import InputError
from moesim.kernels.expert_parallel import HopTuning, LowLatency, Shape, TwoHop

Devices = Callable[[int], list[int]]
SPREAD = [
    pytest.param(lambda n: [0] * n, marks=pytest.mark.gpu, id="one GPU"),
    pytest.param(lambda n: list(range(n)), marks=pytest.mark.multigpu, id="a GPU a rank"),
]


@pytest.mark.parametrize("spread", SPREAD)
@pytest.mark.parametrize(
    ("kind", "ranks", "tokens", "hidden", "k", "sms"),
    [
        ("balanced", 8, 16, 7168, 8, 16),
        ("balanced", 4, 128, 7168, 8, 32),
        ("some ranks idle", 4, 33, 1536, 8, 7),
        ("dropped choices", 4, 37, 1024, 6, 5),
        ("all on one rank", 2, 1, 512, 2, 3),
        ("skewed", 8, 12, 8192, 8, 3),
        ("balanced", 2, 65, 2048, 8, 40),
        ("balanced", 1, 9, 1024, 2, 4),
    ],
)
def test_low_latency_casts_sends_and_combines(
    spread: Devices, kind: str, ranks: int, tokens: int, hidden: int, k: int, sms: int
) -> None:
    group, rng = make_group(spread(ranks)), np.random.default_rng(tokens)
    shape = Shape(tokens, hidden, k, 8 * ranks, fp8=True)
    ll = LowLatency(group, shape)
    for repeat in range(3):  # both halves of the buffers, then the first again
        x = [bf16_rows(tokens, hidden, rng) for _ in range(ranks)]
        ids = [routing(kind, tokens, k, shape.experts, ranks, rng) for _ in range(ranks)]
        topk_w = [rng.random((tokens, k), dtype=np.float32) for _ in range(ranks)]
        for target, value in ((ll.x, x), (ll.topk_idx, ids), (ll.topk_w, topk_w)):
            group.write(target, value)
        for arrays in (ll.recv_x, ll.recv_side, ll.recv_counts, ll.slots):
            group.fill(arrays, POISON)
        ll.dispatch(sms)
        group.synchronize()
        layouts = [ref.layout(i, ranks, 8) for i in ids]
        cast = [ref.quantize_e4m3(rows) for rows in x]
        sides = [
            ref.side_records(i, w, c[1], shape.side_bytes) for i, w, c in zip(ids, topk_w, cast, strict=True)
        ]
        described = shape.scale_bytes + 8 * k + 4
        for r in range(ranks):
            counts, rows, side = ll.recv_counts[r].get(), ll.recv_x[r].get(), ll.recv_side[r].get()
            np.testing.assert_array_equal(ll.slots[r].get(), layouts[r].slots)
            for s in range(ranks):
                sent = np.flatnonzero(layouts[s].slots[:, r] >= 0)
                block = slice(s * tokens, s * tokens + len(sent))
                assert counts[ll.half, s] == len(sent)
                np.testing.assert_array_equal(rows[ll.half, block], cast[s][0][sent])
                got = side[ll.half, block, :described]
                np.testing.assert_array_equal(got, sides[s][sent, :described])
                assert (rows[ll.half, block.stop : (s + 1) * tokens] == POISON).all()
            assert (rows[1 - ll.half] == POISON).all()
        results = [bf16_rows(ranks * tokens, hidden, rng) for _ in range(ranks)]
        weights = [rng.standard_normal((tokens, ranks)).astype(np.float32) for _ in range(ranks)]
        group.write(ll.results, results)
        group.write(ll.weights, weights)
        for weighted in (True, False):
            group.fill(ll.out, POISON)
            ll.combine(sms, weighted)
            group.synchronize()
            for r in range(ranks):
                bases = np.full(ranks, r * tokens, np.int32)
                used = weights[r] if weighted else None
                expected, bound = ref.combine(results, layouts[r].slots, bases, used)
                where = f"round {repeat} rank {r} weighted {weighted}"
                check_sum(ll.out[r].get(), expected, bound, not weighted, where)


@dataclass(frozen=True)
class Hops:
    """A routing over virtual nodes."""

    kind: str
    ranks: int
    node_size: int
    tokens: int
    hidden: int
    fp8: bool
    sms: int

    def __str__(self) -> str:
        nodes = f"{self.ranks // self.node_size}x{self.node_size}"
        payload = "fp8" if self.fp8 else "bf16"
        return f"{self.kind}-{nodes}-{self.tokens}t-{self.hidden}h-{payload}-{self.sms}sm"


HOPS = [
    Hops("balanced", 8, 4, 65, 1024, True, 3),
    Hops("balanced", 8, 2, 33, 1024, False, 3),
    Hops("dropped choices", 4, 2, 129, 2048, True, 5),
    Hops("all on one rank", 8, 4, 9, 1024, True, 2),
    Hops("skewed", 4, 2, 301, 7168, False, 4),
    Hops("balanced", 4, 2, 500, 7168, True, 20),
    Hops("some ranks idle", 4, 2, 1, 7168, True, 3),
    Hops("some ranks idle", 4, 1, 77, 1536, True, 3),
    Hops("balanced", 4, 4, 40, 1024, True, 2),
    Hops("balanced", 2, 1, 1, 1024, True, 1),
    Hops("skewed", 2, 1, 131, 4096, False, 7),
    Hops("balanced", 2, 2, 131, 8192, False, 2),
    Hops("balanced", 1, 1, 20, 1024, True, 2),
]


@pytest.mark.parametrize("spread", SPREAD)
@pytest.mark.parametrize("case", HOPS, ids=str)
def test_two_hops_deliver_and_return_every_token(spread: Devices, case: Hops) -> None:
    ranks, tokens, size = case.ranks, case.tokens, case.node_size
    group, rng = make_group(spread(ranks)), np.random.default_rng(tokens)
    shape = Shape(tokens, case.hidden, 6, 8 * ranks, case.fp8)
    hops = TwoHop(group, shape, size)
    ep = hops.ep
    for repeat in range(3):  # used flags and counters; another division of the SM; no weights
        x = [rng.integers(0, 256, (tokens, shape.row_bytes), dtype=np.uint8) for _ in range(ranks)]
        ids = [routing(case.kind, tokens, 6, shape.experts, ranks, rng) for _ in range(ranks)]
        topk_w = [rng.random((tokens, 6), dtype=np.float32) for _ in range(ranks)]
        weights = [rng.standard_normal((tokens, ranks)).astype(np.float32) for _ in range(ranks)]
        pairs = ((ep.x, x), (ep.topk_idx, ids), (ep.topk_w, topk_w), (ep.weights, weights))
        for target, value in pairs:
            group.write(target, value)
        group.fill(ep.side, 0)
        for arrays in (ep.recv_x, ep.recv_side, ep.out, hops.queue_rows, hops.queue_entries, hops.node_slots):
            group.fill(arrays, POISON)
        hops.layout()
        hops.notify()
        hops.dispatch(case.sms, weighted=repeat < 2, tuning=HopTuning(1, 1, 3) if repeat == 1 else None)
        group.synchronize()

        layouts = [ref.layout(i, ranks, 8) for i in ids]
        slots, (bases, received, _) = [item.slots for item in layouts], ref.notify(layouts, 8)
        sides = [
            ref.side_records(i, w, np.zeros((tokens, shape.scale_bytes // 4), np.float32), shape.side_bytes)
            for i, w in zip(ids, topk_w, strict=True)
        ]
        rows, records = ref.dispatch(x, slots, bases), ref.dispatch(sides, slots, bases)
        for r in range(ranks):
            where = f"{case} round {repeat} rank {r}"
            total, got = received[r, -1], ep.recv_x[r].get()
            np.testing.assert_array_equal(got[:total], rows[r], err_msg=where)
            assert (got[total:] == POISON).all(), f"{where}: wrote behind the last row"
            np.testing.assert_array_equal(ep.recv_side[r].get()[:total], records[r], err_msg=where)

        results = [bf16_rows(ep.capacity, case.hidden, rng) for _ in range(ranks)]
        group.write(ep.results, results)
        for _ in range(2):  # a combine may be repeated on one dispatch
            group.fill(ep.out, POISON)
            hops.combine(case.sms)
            group.synchronize()
            for r in range(ranks):
                used = weights[r] if repeat < 2 else None
                expected, bound = ref.combine_2hop(results, slots[r], bases[r], used, size)
                where = f"{case} round {repeat} rank {r}"
                check_sum(ep.out[r].get(), expected, bound, used is None, where)


@pytest.mark.gpu
def test_a_lost_peer_of_the_low_latency_path_is_reported() -> None:
    shape = Shape(4, 512, 2, 8, fp8=True)
    group = make_group([0, 0], timeout_s=0.05)
    LowLatency(group, shape).dispatch(2, only=[0])
    fails("expected arrivals 2, found 0", "dispatch_ll", 1, group)

    group = make_group([0, 0], timeout_s=0.05)
    ll = LowLatency(group, shape)
    ll.dispatch(2)
    ll.combine(2, only=[0])
    fails("rank 1 is ready failed: expected epoch 1, found 0", "combine_ll", 1, group)


@pytest.mark.gpu
def test_a_lost_peer_of_the_two_hop_path_is_reported() -> None:
    shape, every = Shape(4, 512, 2, 8, fp8=True), np.tile(np.array([0, 7], np.int32), (4, 1))

    def prepared(node_size: int) -> TwoHop:
        hops = TwoHop(make_group([0, 0], timeout_s=0.05), shape, node_size)
        hops.group.write(hops.ep.topk_idx, [every] * 2)
        hops.layout()
        hops.notify()
        return hops

    hops = prepared(node_size=1)
    hops.dispatch(2, only=[0])
    fails("count of rank 1 failed: expected epoch 1, found 0", "dispatch_2hop", 1, hops.group)

    hops = prepared(node_size=1)
    hops.group.synchronize()
    hops.counts[0].set(np.array([4, (1 << 32) + 4], np.uint64))  # announced, never sent
    hops.dispatch(2, only=[0])
    fails("chunk of rank 1 failed: expected epoch 1, found 0", "dispatch_2hop", 1, hops.group)

    hops = prepared(node_size=2)
    hops.dispatch(3, only=[0])
    fails("CTAs of relay 1 failed: expected arrivals 3, found 0", "dispatch_2hop", 1, hops.group)

    hops = prepared(node_size=2)
    hops.dispatch(3)
    hops.combine(2, only=[0])
    fails("rank 1 is ready failed: expected epoch 1, found 0", "combine_2hop", 1, hops.group)

    hops = prepared(node_size=1)
    hops.dispatch(3)
    hops.group.synchronize()
    hops.ready[0].set(np.array([0, 1], np.uint32))  # rank 1 began, and never sent
    hops.combine(2, only=[0])
    fails("chunk of relay 1 failed: expected epoch 1, found 0", "combine_2hop", 1, hops.group)


@pytest.mark.gpu
def test_paths_refuse_what_they_cannot_serve() -> None:
    group = make_group([0, 0])
    with pytest.raises(InputError, match=r"at most 2048 tokens.*use ExpertParallel"):
        LowLatency(group, Shape(4096, 512, 2, 8, fp8=True))
    with pytest.raises(InputError, match="no multiple of node_size=3"):
        TwoHop(group, Shape(4, 512, 2, 8, fp8=True), 3)
