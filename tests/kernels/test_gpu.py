"""Kernels on a GPU against their NumPy meaning, outputs poisoned first; skipped with a reason elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import kernel_references as ref
import numpy as np
import pytest
from gpu_ranks import POISON, check_sum, fails, make_group
from kernel_references import bf16_rows, routing

from moesim.hwmodels.errors import InputError
from moesim.kernels.copy import BulkShape, copy_bulk, copy_ldst, dequantize, make_pairs, quantize
from moesim.kernels.expert_parallel import DispatchTuning, ExpertParallel, Shape
from moesim.kernels.launch import GpuGroup, address, cupy


@dataclass(frozen=True)
class Case:
    """A routing to test; `kind` is one of inputs.ROUTINGS."""

    kind: str
    ranks: int
    tokens: int
    hidden: int
    k: int
    experts: int
    fp8: bool
    sms: int

    def __str__(self) -> str:
        payload = "fp8" if self.fp8 else "bf16"
        return f"{self.kind}-{self.ranks}r-{self.tokens}t-{self.hidden}h-{payload}-{self.sms}sm"


CASES = [
    Case("balanced", 8, 129, 7168, 8, 256, True, 3),
    Case("balanced", 8, 129, 7168, 8, 256, False, 3),
    Case("balanced", 4, 300, 2048, 8, 64, True, 5),
    Case("skewed", 8, 200, 4096, 8, 256, False, 4),
    Case("skewed", 2, 1025, 1024, 8, 32, True, 7),
    Case("some ranks idle", 8, 65, 1024, 6, 64, True, 2),
    Case("all on one rank", 8, 33, 1024, 8, 128, False, 2),
    Case("dropped choices", 4, 77, 1536, 8, 64, True, 3),
    Case("balanced", 8, 1, 7168, 8, 256, True, 4),
    Case("balanced", 2, 1, 1024, 1, 2, False, 1),
    Case("balanced", 1, 50, 1024, 4, 8, True, 2),
    Case("balanced", 4, 40, 8192, 8, 64, False, 1),
]


SHORT_RING = DispatchTuning(warps=3, stages=3, depth=1, group=4)


def check_expert_parallel(group: GpuGroup, case: Case, seed: int) -> None:
    """Two rounds of layout, notify, dispatch and combine."""
    shape = Shape(case.tokens, case.hidden, case.k, case.experts, case.fp8)
    ep, rng = ExpertParallel(group, shape), np.random.default_rng(seed)
    per, ranks = ep.per_rank, case.ranks
    for repeat in range(2):  # the second round meets used flags, counters and the other exchange area
        ids = [routing(case.kind, case.tokens, case.k, case.experts, ranks, rng) for _ in range(ranks)]
        topk_w = [rng.random((case.tokens, case.k), dtype=np.float32) for _ in range(ranks)]
        x = [rng.integers(0, 256, (case.tokens, shape.row_bytes), dtype=np.uint8) for _ in range(ranks)]
        scales = [rng.random((case.tokens, shape.scale_bytes // 4), dtype=np.float32) for _ in range(ranks)]
        side = [np.zeros((case.tokens, shape.side_bytes), np.uint8) for _ in range(ranks)]
        for record, scale in zip(side, scales, strict=True):
            record[:, : shape.scale_bytes] = scale.view(np.uint8)
        poisoned = (ep.slots, ep.lists, ep.bases, ep.rank_counts, ep.expert_counts, ep.received, ep.recv_x)
        for arrays in (*poisoned, ep.recv_side, ep.out, ep.results, ep.experts_received):
            group.fill(arrays, POISON)
        for target, value in ((ep.x, x), (ep.topk_idx, ids), (ep.topk_w, topk_w), (ep.side, side)):
            group.write(target, value)
        ep.layout()
        ep.notify()
        ep.dispatch(case.sms, tuning=SHORT_RING if repeat else None)
        group.synchronize()

        layouts = [ref.layout(idx, ranks, per) for idx in ids]
        slots = [item.slots for item in layouts]
        bases, received, experts = ref.notify(layouts, per)
        sides = [
            ref.side_records(i, w, s if case.fp8 else None, shape.side_bytes)
            for i, w, s in zip(ids, topk_w, scales, strict=True)
        ]
        rows, records = ref.dispatch(x, slots, bases), ref.dispatch(sides, slots, bases)
        for r in range(ranks):
            where = f"{case} seed {seed} round {repeat} rank {r}"
            np.testing.assert_array_equal(ep.slots[r].get(), slots[r], err_msg=where)
            np.testing.assert_array_equal(ep.expert_counts[r].get(), layouts[r].expert_counts, where)
            np.testing.assert_array_equal(ep.bases[r].get(), bases[r], err_msg=where)
            np.testing.assert_array_equal(ep.received[r].get(), received[r], err_msg=where)
            np.testing.assert_array_equal(ep.experts_received[r].get(), experts[r], err_msg=where)
            total = received[r, -1]
            got = ep.recv_x[r].get()
            np.testing.assert_array_equal(got[:total], rows[r], err_msg=where)
            assert (got[total:] == POISON).all(), f"{where}: wrote behind the last row"
            np.testing.assert_array_equal(ep.recv_side[r].get()[:total], records[r], err_msg=where)

        results = [bf16_rows(ep.capacity, case.hidden, rng) for _ in range(ranks)]
        weights = [rng.standard_normal((case.tokens, ranks)).astype(np.float32) for _ in range(ranks)]
        group.write(ep.results, results)
        group.write(ep.weights, weights)
        for weighted in (False, True):
            group.fill(ep.out, POISON)
            ep.combine(case.sms, weighted)
            group.synchronize()
            for r in range(ranks):
                where = f"{case} seed {seed} round {repeat} rank {r} weighted {weighted}"
                used = weights[r] if weighted else None
                expected, bound = ref.combine(results, slots[r], bases[r], used)
                check_sum(ep.out[r].get(), expected, bound, not weighted, where)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_expert_parallel_with_all_ranks_on_one_gpu(case: Case) -> None:
    check_expert_parallel(make_group([0] * case.ranks), case, seed=1)


@pytest.mark.gpu
@pytest.mark.parametrize("tuning", [None, SHORT_RING])
def test_own_rows_can_stay_where_they_are(tuning: DispatchTuning | None) -> None:
    group, rng = make_group([0] * 3), np.random.default_rng(5)
    ep = ExpertParallel(group, Shape(tokens=50, hidden=1024, k=2, experts=12, fp8=True))
    group.write(ep.topk_idx, [routing("balanced", 50, 2, 12, 3, rng) for _ in range(3)])
    group.write(ep.x, [rng.integers(0, 256, (50, 1024), dtype=np.uint8) for _ in range(3)])
    group.fill(ep.recv_x, POISON)
    ep.layout()
    ep.notify()
    ep.dispatch(2, tuning=tuning, own=False)
    group.synchronize()
    slots, bases = [s.get() for s in ep.slots], [b.get() for b in ep.bases]
    for rank, rows in enumerate(ref.dispatch([x.get() for x in ep.x], slots, np.array(bases))):
        first, count = int(bases[rank][rank]), int((slots[rank][:, rank] >= 0).sum())
        rows[first : first + count] = POISON
        assert 0 < count < len(rows)
        np.testing.assert_array_equal(ep.recv_x[rank].get()[: len(rows)], rows)


@pytest.mark.multigpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_expert_parallel_across_gpus(case: Case) -> None:
    check_expert_parallel(make_group(list(range(case.ranks))), case, seed=2)


@pytest.mark.gpu
@pytest.mark.parametrize("n_bytes", [16, 4080, 8192, 1 << 20, (1 << 20) + 48])
@pytest.mark.parametrize("ctas", [1, 5, 132])
def test_copies_move_every_byte_and_no_other(n_bytes: int, ctas: int) -> None:
    group, rng = make_group([0]), np.random.default_rng(n_bytes)
    sources = [rng.integers(0, 256, n_bytes, dtype=np.uint8) for _ in range(3)]
    held = [group.put(0, s) for s in sources]
    targets = [group.symmetric((n_bytes + 64,), "u1", POISON)[0] for _ in range(3)]
    pairs = make_pairs(group, 0, [(s, t[:n_bytes]) for s, t in zip(held, targets, strict=True)])
    small = BulkShape(warps=2, stages=3, depth=1, chunk_bytes=2048)
    runs: list[Callable[[], None]] = [
        lambda: copy_ldst(group, 0, pairs, ctas),
        lambda: copy_ldst(group, 0, pairs, ctas, threads=128),
        lambda: copy_bulk(group, 0, pairs, ctas),
        lambda: copy_bulk(group, 0, pairs, ctas, BulkShape(4, 12, 4, 4096, 3)),
        lambda: copy_bulk(group, 0, pairs, ctas, small),
        lambda: copy_bulk(group, 0, pairs, ctas, BulkShape(1, 12, 8, 16384)),
    ]
    for run in runs:
        for target in targets:
            group.fill([target], POISON)
        run()
        group.synchronize()
        for source, target in zip(sources, targets, strict=True):
            got = target.get()
            assert (got[:n_bytes] == source).all() and (got[n_bytes:] == POISON).all()


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "columns"), [(1, 128), (3, 128), (37, 1024), (256, 7168), (5, 640)])
def test_quantisation_is_bit_exact_both_ways(rows: int, columns: int) -> None:
    group, rng = make_group([0]), np.random.default_rng(rows * columns)
    x = bf16_rows(rows, columns, rng)
    x[0, :8] = [0, 0x8000, 1, 0x8001, 0x7F7F, 0xFF7F, 0x0080, 0x3F80]
    for content in (x, np.zeros_like(x), rng.integers(0, 65536, x.shape).astype(np.uint16)):
        expected_q, expected_scales = ref.quantize_e4m3(content)
        q = group.symmetric(x.shape, "u1", POISON)[0]
        scales = group.symmetric((rows, columns // 128), "f4", POISON)[0]
        y = group.symmetric(x.shape, "u2", POISON)[0]
        quantize(group, 0, group.put(0, content), q, scales, ctas=7)
        dequantize(group, 0, q, scales, y, ctas=3)
        group.synchronize()
        number = ~np.isnan(np.repeat(expected_scales, 128, axis=1))
        np.testing.assert_array_equal(scales.get(), expected_scales)
        got = q.get()
        np.testing.assert_array_equal((got & 0x7F)[number], (expected_q & 0x7F)[number])
        zero = (expected_q & 0x7F) == 0x7F  # the sign of a NaN is free
        np.testing.assert_array_equal(got[number & ~zero], expected_q[number & ~zero])
        back = ref.dequantize_e4m3(got, scales.get())
        finite = ~np.isnan(ref.bf16_to_f32(back))
        np.testing.assert_array_equal(y.get()[finite], back[finite])
        assert np.isnan(ref.bf16_to_f32(y.get())[~finite]).all()


@pytest.mark.gpu
def test_a_lost_peer_is_reported_in_words_by_every_waiting_kernel() -> None:
    shape = Shape(tokens=9, hidden=1024, k=2, experts=8, fp8=True)

    def prepared(dispatched: bool = True, capacity: int | None = None) -> ExpertParallel:
        ep = ExpertParallel(make_group([0, 0], timeout_s=0.05), shape, capacity)
        if capacity:
            ep.group.write(ep.topk_idx, [np.tile(np.array([0, 1], np.int32), (9, 1))] * 2)
        ep.layout()
        ep.notify(only=None if dispatched else [0])
        return ep

    ep = prepared(dispatched=False)
    ep.dispatch(2, only=[0])  # sees the error and does nothing
    fails("expected epoch 1, found 0", "notify", 1, ep.group)
    ep = prepared()
    ep.dispatch(2, only=[0])
    fails("expected arrivals 2, found 0", "dispatch", 1, ep.group)
    ep = prepared()
    ep.dispatch(2)
    ep.combine(2, only=[0])
    fails("expected epoch 1, found 0", "combine", 1, ep.group)
    ep = prepared(capacity=3)
    ep.dispatch(2)
    fails("too small failed: expected rows 3, found 18", "notify", 0, ep.group)
    group = make_group([0, 0], timeout_s=0.05)
    group.wait(0, address(group.symmetric((4,), "u4")[0]), 7, peer=1)
    fails("expected reached 7, found 0", "signal", 1, group)


@pytest.mark.gpu
def test_signals_order_streams_and_barriers_repeat() -> None:
    group = make_group([0] * 4)
    flag = group.symmetric((4,), "u4")[0]
    group.wait(1, address(flag), 3, peer=0)
    group.post(0, address(flag), 3)
    for _ in range(20):
        group.barrier()
    group.synchronize()
    assert int(flag.get()[0]) == 3


@pytest.mark.gpu
def test_a_gpu_that_does_not_exist_is_refused() -> None:
    make_group([0])
    with pytest.raises(InputError, match="this machine shows"):
        GpuGroup([cupy().cuda.runtime.getDeviceCount()])


@pytest.mark.multigpu
@pytest.mark.parametrize("ctas", [1, 8])
def test_copies_push_and_pull_between_gpus(ctas: int) -> None:
    group, n_bytes = make_group([0, 1]), (4 << 20) + 16
    data = np.random.default_rng(0).integers(0, 256, n_bytes, dtype=np.uint8)
    for run in (copy_ldst, copy_bulk):
        for issuer in (0, 1):  # the holder pushes, the other pulls
            source, target = group.put(0, data), group.symmetric((n_bytes,), "u1", POISON)[1]
            run(group, issuer, make_pairs(group, issuer, [(source, target)]), ctas)
            group.synchronize()
            assert (target.get() == data).all(), f"{run.__name__} issued by {issuer}"
