"""The NumPy meaning of the kernels, against independent definitions."""

from __future__ import annotations

import kernel_references as ref
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

finite = st.floats(float(np.float32(-3e38)), float(np.float32(3e38)), width=32, allow_nan=False)


@given(hnp.arrays(np.float32, 64, elements=finite))
def test_bf16_is_the_nearest_value_with_ties_to_even(values: np.ndarray) -> None:
    bits = ref.f32_to_bf16(values)
    got = ref.bf16_to_f32(bits).astype(np.float64)
    for step in (-1, 1):
        other = ref.bf16_to_f32((bits.astype(np.int64) + step).astype(np.uint16)).astype(np.float64)
        ok = np.isfinite(other) & np.isfinite(got)
        near, far = np.abs(got - values)[ok], np.abs(other - values)[ok]
        assert (near <= far).all()
        assert ((near < far) | (bits[ok] % 2 == 0) | (near == 0)).all()


def test_e4m3_is_the_nearest_value_with_ties_to_even_and_saturates() -> None:
    # OCP 8-bit floating point specification: largest 448, smallest normal 2^-6, smallest subnormal 2^-9.
    assert ref.E4M3[[0x7E, 0x08, 0x01]].tolist() == [448, 2.0**-6, 2.0**-9]
    assert np.isnan(ref.E4M3[[0x7F, 0xFF]]).all()
    numbers = np.array([b for b in range(256) if b & 0x7F != 0x7F], np.uint8)
    assert (ref.f32_to_e4m3(ref.E4M3[numbers]) == numbers).all()
    values = np.array([17.0, 19.0, 2.0**-10, 3 * 2.0**-10, 1e9, -1e9], np.float32)
    assert ref.E4M3[ref.f32_to_e4m3(values)].tolist() == [16.0, 20.0, 0.0, 2.0**-8, 448.0, -448.0]


@given(hnp.arrays(np.float32, (3, 256), elements=st.floats(-1e4, 1e4, width=32)))
def test_quantisation_error_stays_within_half_a_step(values: np.ndarray) -> None:
    x = ref.f32_to_bf16(values)
    q, scales = ref.quantize_e4m3(x)
    exact = ref.bf16_to_f32(x).reshape(3, 2, 128).astype(np.float64)
    back = ref.E4M3[q].reshape(3, 2, 128).astype(np.float64) * scales[:, :, None]
    step = np.maximum(np.abs(exact) / 16, scales[:, :, None] * 2.0**-10)  # 3 mantissa bits, subnormals below
    assert (np.abs(back - exact) <= step * (1 + 1e-5)).all()
    amax = np.abs(exact).max(axis=2)
    large = amax > 1e-15
    assert (np.abs(ref.E4M3[q]).reshape(3, 2, 128).max(axis=2)[large] == 448).all()
    assert np.allclose(ref.bf16_to_f32(ref.dequantize_e4m3(q, scales)).reshape(3, 2, 128), back, rtol=2**-8)


@st.composite
def routings(draw: st.DrawFn) -> tuple[int, int, list[np.ndarray]]:
    ranks, per = draw(st.sampled_from([1, 2, 4, 8])), draw(st.integers(1, 4))
    k, tokens = draw(st.integers(1, 8)), draw(st.integers(1, 20))
    ids = hnp.arrays(np.int32, (tokens, k), elements=st.integers(-1, ranks * per - 1))
    return ranks, per, [draw(ids) for _ in range(ranks)]


@settings(max_examples=60, deadline=None)
@given(routings())
def test_dispatch_then_combine_returns_every_token_times_its_number_of_ranks(
    routing: tuple[int, int, list[np.ndarray]],
) -> None:
    ranks, per, ids = routing
    layouts = [ref.layout(idx, ranks, per) for idx in ids]
    bases, received, experts = ref.notify(layouts, per)
    tokens = ids[0].shape[0]
    rows = [
        ref.f32_to_bf16(np.random.default_rng(r).integers(-8, 8, (tokens, 16)).astype(np.float32))
        for r in range(ranks)
    ]
    buffers = ref.dispatch([row.view(np.uint8) for row in rows], [la.slots for la in layouts], bases)
    assert [len(b) for b in buffers] == received[:, -1].tolist()
    assert experts.sum() == sum((idx >= 0).sum() for idx in ids)
    for rank, idx in enumerate(ids):
        reached = [len({e // per for e in row if e >= 0}) for row in idx.tolist()]
        assert ((layouts[rank].slots >= 0).sum(axis=1) == reached).all()
        results = [b.view(np.uint16) for b in buffers]
        out, bound = ref.combine(results, layouts[rank].slots, bases[rank], None)
        expected = ref.bf16_to_f32(rows[rank]) * np.array(reached)[:, None]
        assert (ref.bf16_to_f32(out) == expected).all() and (bound >= 0).all()


def test_two_hops_round_each_node_and_then_the_sum() -> None:
    # 256 + 1 needs nine bits: a node that adds them loses the 1, two nodes that hold them do not add before.
    rows = [ref.f32_to_bf16(np.full((1, 8), v, np.float32)) for v in (256.0, 1.0, 1.0, -256.0)]
    slots, bases = np.zeros((1, 4), np.int32), np.zeros(4, np.int32)
    whole, _ = ref.combine(rows, slots, bases, None)
    halves, bound = ref.combine_2hop(rows, slots, bases, None, 2)
    assert (ref.bf16_to_f32(whole) == 2.0).all()
    assert (ref.bf16_to_f32(halves) == 1.0).all() and (bound >= 1.0).all()
    slots[0, 2:] = -1
    weights = np.array([[0.5, 2.0, 9.0, 9.0]], np.float32)
    assert (ref.bf16_to_f32(ref.combine_2hop(rows, slots, bases, weights, 2)[0]) == 130.0).all()
