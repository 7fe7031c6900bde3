"""NumPy reference of every kernel, with BF16 and E4M3 as bits (uint16, uint8) since NumPy has neither."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moesim.hwmodels.errors import InputError

ROUTINGS = ("balanced", "skewed", "some ranks idle", "all on one rank", "dropped choices")


def routing(
    kind: str, tokens: int, k: int, experts: int, ranks: int, rng: np.random.Generator
) -> NDArray[np.int32]:
    """Expert ids [tokens, k] as the top k of random scores; ids are distinct in a row except -1.

    "balanced" draws independent normal scores, "skewed" favours low ids, "some ranks idle" uses only the
    upper half of the experts, "all on one rank" only those of rank 0, and "dropped choices" replaces 60 % of
    a balanced routing by -1.
    """
    scores = rng.standard_normal((tokens, experts), dtype=np.float32)
    if kind == "skewed":
        scores += np.linspace(3, -3, experts, dtype=np.float32)
    elif kind == "some ranks idle":
        scores[:, : experts // 2] = -np.inf
    elif kind == "all on one rank":
        scores[:, experts // ranks :] = -np.inf
    elif kind not in ROUTINGS:
        raise InputError(f"unknown routing {kind!r}; known: {', '.join(ROUTINGS)}")
    ids = np.argsort(-scores, axis=1, kind="stable")[:, :k].astype(np.int32)
    if kind == "dropped choices":
        ids[rng.random(ids.shape) < 0.6] = -1
    return np.ascontiguousarray(ids)


def bf16_rows(rows: int, columns: int, rng: np.random.Generator) -> NDArray[np.uint16]:
    """Random finite BF16 bits: normal values, each row scaled by its own power of two (2^-6 to 2^6)."""
    values = rng.standard_normal((rows, columns), dtype=np.float32)
    values *= np.exp2(rng.integers(-6, 7, (rows, 1))).astype(np.float32)
    bits: NDArray[np.uint16] = (values.view(np.uint32) >> 16).astype(np.uint16)
    return bits


TILE = 128
E4M3_MAX = np.float32(448.0)
AMAX_FLOOR = np.float32(2.0**-60)

U8 = NDArray[np.uint8]
U16 = NDArray[np.uint16]
I32 = NDArray[np.int32]
F32 = NDArray[np.float32]


def bf16_to_f32(bits: U16) -> F32:
    """Exact value of BF16 bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def f32_to_bf16(values: F32) -> U16:
    """BF16 bits nearest to f32 values, ties to even; NaN becomes 0x7fff as on the GPU."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), np.uint16(0x7FFF), rounded.astype(np.uint16))


def _e4m3_values() -> F32:
    """The value of each E4M3 byte: bias 7, subnormals of 2^-9, NaN for 0x7f and 0xff, no infinity."""
    byte = np.arange(256)
    sign, exponent, mantissa = byte >> 7, (byte >> 3) & 15, byte & 7
    size = np.where(
        exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent.astype(float) - 7)
    )
    size[(byte & 127) == 127] = np.nan
    return (np.where(sign == 1, -size, size)).astype(np.float32)


E4M3 = _e4m3_values()


def f32_to_e4m3(values: F32) -> U8:
    """E4M3 bits nearest to f32 values, ties to even, saturating at +-448; NaN becomes 0x7f."""
    sizes = E4M3[:127].astype(np.float64)
    middles = (sizes[:-1] + sizes[1:]) / 2
    magnitude = np.abs(values.astype(np.float64))
    index = np.searchsorted(middles, magnitude, side="left")  # a tie goes to the lower value
    tie = (index < 126) & (magnitude == middles[np.minimum(index, 125)])
    index = np.where(tie & (index % 2 == 1), index + 1, index)
    signed = index.astype(np.uint8) | (np.signbit(values).astype(np.uint8) << 7)
    return np.where(np.isnan(values), np.uint8(0x7F), signed)


def quantize_e4m3(x: U16) -> tuple[U8, F32]:
    """BF16 bits [rows, columns] -> E4M3 bits [rows, columns], scales [rows, columns / 128] (quantize.ptx)."""
    rows, columns = x.shape
    tiles = bf16_to_f32(x).reshape(rows, columns // TILE, TILE)
    amax = np.abs(tiles).max(axis=2) if rows else np.zeros((0, columns // TILE), np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        floored = np.maximum(amax, AMAX_FLOOR)  # keeps NaN
        scales = (floored / E4M3_MAX).astype(np.float32)
        inverse = (E4M3_MAX / floored).astype(np.float32)
        q = f32_to_e4m3(tiles * inverse[:, :, None])
    return q.reshape(rows, columns), scales


def dequantize_e4m3(q: U8, scales: F32) -> U16:
    """E4M3 bits and scales of 1x128 tiles -> BF16 bits (dequantize.ptx)."""
    rows, columns = q.shape
    with np.errstate(invalid="ignore", over="ignore"):
        values = E4M3[q].reshape(rows, columns // TILE, TILE) * scales[:, :, None].astype(np.float32)
    return f32_to_bf16(values.reshape(rows, columns))


@dataclass(frozen=True, slots=True)
class ReceiveLayout:
    """The rows that one source sends: slots [tokens, ranks] (-1 for none), and counts by rank and expert."""

    slots: I32
    rank_counts: I32
    expert_counts: I32


def layout(topk_idx: I32, ranks: int, experts_per_rank: int) -> ReceiveLayout:
    """Slots and counts of one source (layout.ptx). Id -1 means none; expert e is on rank e // per rank."""
    experts = ranks * experts_per_rank
    valid = (topk_idx >= 0) & (topk_idx < experts)
    target = np.where(valid, topk_idx // experts_per_rank, ranks)
    goes = np.stack([(target == rank).any(axis=1) for rank in range(ranks)], axis=1)
    order = np.cumsum(goes, axis=0) - 1
    slots = np.where(goes, order, -1).astype(np.int32)
    counts = np.bincount(topk_idx[valid].ravel(), minlength=experts).astype(np.int32)
    return ReceiveLayout(slots, goes.sum(axis=0).astype(np.int32), counts)


def notify(layouts: Sequence[ReceiveLayout], experts_per_rank: int) -> tuple[I32, I32, I32]:
    """Bases [source, rank], received [rank, sources + 1], expert choices [rank, experts_per_rank]."""
    ranks = len(layouts)
    counts = np.stack([item.rank_counts for item in layouts])
    ends = np.cumsum(counts, axis=0)
    bases = (ends - counts).astype(np.int32)
    received = np.zeros((ranks, ranks + 1), np.int32)
    received[:, :ranks], received[:, ranks] = bases.T, ends[-1]
    experts = sum(item.expert_counts for item in layouts).reshape(ranks, experts_per_rank)  # type: ignore[union-attr]
    return bases, received, experts.astype(np.int32)


def dispatch(rows: Sequence[U8], slots: Sequence[I32], bases: I32) -> list[U8]:
    """Receive buffers by rank, from each source's rows (bytes [tokens, row_bytes]) and slots (dispatch)."""
    out = []
    for rank in range(len(rows)):
        total = sum(int((slot[:, rank] >= 0).sum()) for slot in slots)
        buffer = np.zeros((total, rows[0].shape[1]), np.uint8)
        for source, (data, slot) in enumerate(zip(rows, slots, strict=True)):
            tokens = np.flatnonzero(slot[:, rank] >= 0)
            buffer[bases[source, rank] + slot[tokens, rank]] = data[tokens]
        out.append(buffer)
    return out


def combine(results: Sequence[U16], slots: I32, bases: I32, weights: F32 | None) -> tuple[U16, F32]:
    """Combined rows of one owner (combine.ptx): BF16 bits [tokens, hidden], and a bound of the f32 error.

    results[r]: BF16 bits of rank r in receive order; slots [tokens, ranks] and bases [ranks] of the owner.
    Each step is an f64 multiply-add rounded to f32, which is the GPU's fused f32 step up to double rounding.
    """
    tokens, ranks = slots.shape
    hidden = results[0].shape[1]
    total, size = np.zeros((tokens, hidden), np.float32), np.zeros((tokens, hidden), np.float64)
    for rank in range(ranks):
        has = np.flatnonzero(slots[:, rank] >= 0)
        rows = bf16_to_f32(results[rank][bases[rank] + slots[has, rank]]).astype(np.float64)
        if weights is not None:
            rows *= weights[has, rank][:, None].astype(np.float64)
        total[has] = (total[has].astype(np.float64) + rows).astype(np.float32)
        size[has] += np.abs(rows)
    return f32_to_bf16(total), (size * ranks * 2.0**-24).astype(np.float32)


def combine_2hop(
    results: Sequence[U16], slots: I32, bases: I32, weights: F32 | None, node_size: int
) -> tuple[U16, F32]:
    """`combine` over virtual nodes of `node_size` ranks (combine_2hop.ptx), with each node's sum in BF16.

    The bound also covers a last-bit difference in each node's rounding.
    """
    tokens, ranks = slots.shape
    nodes = [slice(first, first + node_size) for first in range(0, ranks, node_size)]
    sums = [
        combine(results[n], slots[:, n], bases[n], None if weights is None else weights[:, n]) for n in nodes
    ]
    here = np.stack([(slots[:, n] >= 0).any(axis=1) for n in nodes], axis=1)
    rows = np.where(here, np.arange(tokens)[:, None], -1).astype(np.int32)
    out, bound = combine([partial for partial, _ in sums], rows, np.zeros(len(nodes), np.int32), None)
    for partial, inside in sums:
        bound = (bound + inside + np.abs(bf16_to_f32(partial)) * 2.0**-7).astype(np.float32)
    return out, bound


def side_records(topk_idx: I32, topk_w: F32, scales: F32 | None, side_bytes: int) -> NDArray[np.uint8]:
    """Side records [tokens, side_bytes]: scales, expert ids, weights, token index, zeros (layout.ptx)."""
    tokens = topk_idx.shape[0]
    parts = [] if scales is None else [scales.astype(np.float32).view(np.uint8)]
    index = np.arange(tokens, dtype=np.int32)[:, None]
    parts += [topk_idx.astype(np.int32).view(np.uint8), topk_w.astype(np.float32).view(np.uint8)]
    parts.append(index.view(np.uint8))
    record = np.concatenate([p.reshape(tokens, -1) for p in parts], axis=1)
    return np.pad(record, ((0, 0), (0, side_bytes - record.shape[1])))
