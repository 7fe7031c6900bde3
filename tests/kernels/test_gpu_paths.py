"""Low-latency and two-hop paths on GPUs against the NumPy references; skipped with a reason elsewhere."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import pytest

from moesim.hwmodels.errors import InputError
from moesim.kernels import references as ref
from moesim.kernels.expert_parallel import Shape
from moesim.kernels.inputs import bf16_rows, routing
from moesim.kernels.launch import DeviceTimeoutError, Group
from moesim.kernels.loader import GpuUnavailableError, cupy
from moesim.kernels.low_latency import LowLatency
from moesim.kernels.two_hop import TwoHop

POISON = 0xEE
Devices = Callable[[int], list[int]]
SPREAD = [
    pytest.param(lambda n: [0] * n, marks=pytest.mark.gpu, id="one GPU"),
    pytest.param(lambda n: list(range(n)), marks=pytest.mark.multigpu, id="a GPU a rank"),
]


def make_group(devices: list[int], timeout_s: float = 10.0) -> Group:
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    try:
        runtime = cupy().cuda.runtime
    except GpuUnavailableError as error:
        pytest.skip(str(error))
    if runtime.getDeviceProperties(0)["major"] < 9:
        pytest.skip("needs compute capability 9.0 (Hopper)")
    if (count := runtime.getDeviceCount()) <= max(devices):
        pytest.skip(f"needs {max(devices) + 1} GPUs, this machine shows {count}")
    return Group(devices, timeout_s)


@pytest.mark.parametrize("spread", SPREAD)
@pytest.mark.parametrize(
    ("kind", "ranks", "tokens", "hidden", "k", "sms"),
    [
        ("balanced", 8, 16, 7168, 8, 16),
        ("dropped choices", 4, 37, 1024, 6, 5),
        ("all on one rank", 2, 1, 512, 2, 3),
        ("skewed", 8, 12, 8192, 8, 3),
    ],
)
def test_low_latency_casts_sends_and_combines(
    spread: Devices, kind: str, ranks: int, tokens: int, hidden: int, k: int, sms: int
) -> None:
    group, rng = make_group(spread(ranks)), np.random.default_rng(tokens)
    shape = Shape(tokens, hidden, k, 8 * ranks, fp8=True)
    ll = LowLatency(group, shape)
    for _ in range(3):  # both halves of the buffers, then the first again
        x = [bf16_rows(tokens, hidden, rng) for _ in range(ranks)]
        ids = [routing(kind, tokens, k, shape.experts, ranks, rng) for _ in range(ranks)]
        topk_w = [rng.random((tokens, k), dtype=np.float32) for _ in range(ranks)]
        for target, value in ((ll.x, x), (ll.topk_idx, ids), (ll.topk_w, topk_w)):
            group.write(target, value)
        for arrays in (ll.recv_x, ll.recv_side, ll.recv_counts, ll.slots, ll.out):
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
        ll.combine(sms)
        group.synchronize()
        for r in range(ranks):
            bases = np.full(ranks, r * tokens, np.int32)
            expected, bound = ref.combine(results, layouts[r].slots, bases, weights[r])
            error = np.abs(ref.bf16_to_f32(ll.out[r].get()) - ref.bf16_to_f32(expected))
            assert (error <= np.abs(ref.bf16_to_f32(expected)) * 2.0**-7 + bound).all()


@pytest.mark.parametrize("spread", SPREAD)
@pytest.mark.parametrize(
    ("kind", "ranks", "node_size", "tokens", "fp8"),
    [
        ("balanced", 8, 4, 65, True),
        ("balanced", 8, 2, 33, False),
        ("dropped choices", 4, 2, 128, True),
        ("all on one rank", 8, 4, 9, True),
    ],
)
def test_two_hops_deliver_and_return_every_token(
    spread: Devices, kind: str, ranks: int, node_size: int, tokens: int, fp8: bool
) -> None:
    group, rng = make_group(spread(ranks)), np.random.default_rng(tokens)
    shape, nodes = Shape(tokens, 1024, 6, 8 * ranks, fp8), ranks // node_size
    hops = TwoHop(group, shape, node_size)
    per_node = shape.experts // nodes
    for _ in range(2):
        x, ids, w = {}, {}, {}
        for rank in range(ranks):
            x[rank] = rng.integers(0, 256, (tokens, shape.row_bytes), dtype=np.uint8)
            ids[rank] = routing(kind, tokens, 6, shape.experts, ranks, rng)
            w[rank] = rng.random((tokens, 6), dtype=np.float32)
        for local, rail in enumerate(hops.rails):
            mine = list(range(local, ranks, node_size))
            for target, value in ((rail.x, x), (rail.topk_idx, ids), (rail.topk_w, w)):
                rail.group.write(target, [value[r] for r in mine])
        for hop in hops.nodes:
            hop.group.fill(hop.recv_x, POISON)
        hops.prepare()
        hops.dispatch(3)
        group.synchronize()

        first, second, arrived, relayed_ids = {}, {}, {}, {}
        for local in range(node_size):
            mine = list(range(local, ranks, node_size))
            layouts = [ref.layout(ids[r], nodes, per_node) for r in mine]
            bases, _, _ = ref.notify(layouts, per_node)
            rows = ref.dispatch([x[r] for r in mine], [item.slots for item in layouts], bases)
            raw = [ids[r].view(np.uint8).reshape(tokens, -1) for r in mine]
            choices = ref.dispatch(raw, [item.slots for item in layouts], bases)
            for node, r in enumerate(mine):
                first[r] = (layouts[node].slots, bases[node])
                arrived[r] = rows[node]
                relayed_ids[r] = choices[node].view(np.int32) - node * per_node
        for node in range(nodes):
            mine = list(range(node * node_size, (node + 1) * node_size))
            layouts = [ref.layout(relayed_ids[r], node_size, 8) for r in mine]
            bases, _, _ = ref.notify(layouts, 8)
            rows = ref.dispatch([arrived[r] for r in mine], [item.slots for item in layouts], bases)
            for local, r in enumerate(mine):
                second[r] = (layouts[local].slots, bases[local])
                got = hops.nodes[node].recv_x[local].get()
                np.testing.assert_array_equal(got[: len(rows[local])], rows[local], f"rank {r}")
                assert (got[len(rows[local]) :] == POISON).all()

        results = {}
        for node, hop in enumerate(hops.nodes):
            made = [bf16_rows(hop.capacity, 1024, rng) for _ in range(node_size)]
            hop.group.write(hop.results, made)
            results[node] = made
        hops.combine(3)
        group.synchronize()
        partial = {
            r: ref.combine(results[r // node_size], second[r][0], second[r][1], None)[0] for r in range(ranks)
        }
        for local, rail in enumerate(hops.rails):
            mine = list(range(local, ranks, node_size))
            for node, r in enumerate(mine):
                expected, _ = ref.combine([partial[m] for m in mine], first[r][0], first[r][1], None)
                np.testing.assert_array_equal(rail.out[node].get(), expected, f"rank {r}")


@pytest.mark.gpu
def test_a_lost_peer_of_the_low_latency_dispatch_is_reported() -> None:
    group = make_group([0, 0], timeout_s=0.05)
    LowLatency(group, Shape(4, 512, 2, 8, fp8=True)).dispatch(2, only=[1])
    with pytest.raises(DeviceTimeoutError, match="expected arrivals 2, found 0") as caught:
        group.synchronize()
    assert (caught.value.kernel, caught.value.rank, caught.value.peer) == ("dispatch_ll", 1, 0)


@pytest.mark.gpu
def test_paths_refuse_what_they_cannot_serve() -> None:
    group = make_group([0, 0])
    with pytest.raises(InputError, match=r"at most 2048 tokens.*use ExpertParallel"):
        LowLatency(group, Shape(4096, 512, 2, 8, fp8=True))
    with pytest.raises(InputError, match="no multiple of node_size=3"):
        TwoHop(group, Shape(4, 512, 2, 8, fp8=True), 3)
