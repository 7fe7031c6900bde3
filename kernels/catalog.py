"""The catalog of kernels as data: file, entry, parameters, launch rule, limits, bytes they must move."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from importlib.resources import files

from msgspec import Struct

SHARED_MEMORY_LIMIT_BYTES = 227 * 1024  # opt-in limit of a CTA on compute capability 9.0
HEADER_BYTES = 128  # header of a two-hop dispatch queue entry, beside the side record
Sizes = Mapping[str, int]


class Kernel(Struct, frozen=True):
    """One PTX kernel.

    Parameters are (name, PTX type) in order. `block` is the allowed range of threads; `shared_bytes` maps the
    launch's sizes to dynamic shared memory; `moved_bytes` maps them to (read, written) bytes on one rank.
    Among the sizes, `copies` counts (token, rank) pairs; over virtual nodes `sent` counts (token, other node)
    pairs, and `kept` counts own tokens that stay in the own node.
    """

    name: str
    entry: str
    parameters: tuple[tuple[str, str], ...]
    block: tuple[int, int]
    registers: int
    moved_bytes: Callable[[Sizes], tuple[int, int]]
    shared_bytes: Callable[[Sizes], int] = lambda sizes: 0
    minimum_capability: tuple[int, int] = (9, 0)

    @property
    def file(self) -> str:
        """File name below kernels/ptx."""
        return f"{self.name}.ptx"

    def source(self) -> str:
        """The PTX text."""
        return files("moesim.kernels").joinpath("ptx", self.file).read_text(encoding="utf-8")

    def digest(self) -> str:
        """SHA-256 of the PTX text, which identifies the kernel in a profile."""
        return hashlib.sha256(self.source().encode()).hexdigest()


def _parameters(text: str) -> tuple[tuple[str, str], ...]:
    """Parse "u64 a b; u32 c" into ((a, u64), (b, u64), (c, u32))."""
    return tuple(
        (name, kind) for part in text.split(";") for kind, *names in [part.split()] for name in names
    )


def _copied(sizes: Sizes) -> tuple[int, int]:
    total = sizes["n_pairs"] * sizes["n_bytes"]
    return total, total


def _quantized(sizes: Sizes) -> tuple[int, int]:
    values = sizes["rows"] * sizes["columns"]
    return 2 * values, values + values // 32


def _layout(sizes: Sizes) -> tuple[int, int]:
    tokens, k, ranks = sizes["tokens"], sizes["k"], sizes["ranks"]
    written = tokens * (8 * ranks + 8 * k + 4) + 4 * ranks * (1 + sizes["experts_per_rank"])
    return tokens * 8 * k, written


def _notified(sizes: Sizes) -> tuple[int, int]:
    words = sizes["ranks"] * (sizes["ranks"] + sizes["experts_per_rank"])
    return 8 * words, 4 * (words + 2 * sizes["ranks"] + 1 + sizes["experts_per_rank"])


def _dispatched(sizes: Sizes) -> tuple[int, int]:
    size = sizes["row_bytes"] + sizes["side_bytes"]
    return sizes["tokens"] * (size + 4 * sizes["ranks"]), sizes["copies"] * size


def _dispatched_ll(sizes: Sizes) -> tuple[int, int]:
    written = sizes["copies"] * (sizes["hidden"] + sizes["side_bytes"])
    return sizes["tokens"] * (2 * sizes["hidden"] + 8 * sizes["k"]), written


def _combined(sizes: Sizes) -> tuple[int, int]:
    row = sizes["parts"] * sizes["part_bytes"]
    return sizes["copies"] * row + 4 * sizes["tokens"] * sizes["ranks"], sizes["tokens"] * row


def _dispatched_2hop(sizes: Sizes) -> tuple[int, int]:
    size, sent = sizes["row_bytes"] + sizes["side_bytes"], sizes["sent"]
    return (2 * sent + sizes["kept"]) * size, sent * (size + 128) + sizes["copies"] * size


def _combined_2hop(sizes: Sizes) -> tuple[int, int]:
    row, partial = 2 * sizes["hidden"], sizes["sent"] + sizes["kept"]
    return (sizes["copies"] + partial) * row, (partial + sizes["tokens"]) * row


def hop_stage_bytes(row_bytes: int, side_bytes: int) -> int:
    """Shared-memory bytes of a two-hop dispatch row and its side record with header, on 128-byte lines."""
    return (row_bytes + 127) // 128 * 128 + (side_bytes + HEADER_BYTES + 127) // 128 * 128


def dispatch_stage_bytes(row_bytes: int, side_bytes: int, ranks: int, group: int) -> int:
    """Shared-memory bytes of a dispatch stage of `group` tokens: rows, records, slots, mbarriers, a word."""
    lines = (group * row_bytes + 127) // 128 + (group * side_bytes + 127) // 128
    slots = (4 * group * ranks + 15) // 16 * 16 + (16 if ranks % 4 else 0)
    return 128 * lines + slots + 20


KERNELS: dict[str, Kernel] = {
    kernel.name: kernel
    for kernel in (
        Kernel(
            name="copy_ldst",
            entry="copy_ldst_v1",
            parameters=_parameters("u64 pairs; u32 n_pairs; u64 n_bytes"),
            block=(128, 1024),
            registers=64,
            moved_bytes=_copied,
        ),
        Kernel(
            name="copy_bulk",
            entry="copy_bulk_v1",
            parameters=_parameters(
                "u64 pairs; u32 n_pairs; u64 n_bytes; u32 chunk_bytes stages depth spread_log2"
            ),
            block=(32, 256),
            registers=48,
            moved_bytes=_copied,
            shared_bytes=lambda s: s["warps"] * s["stages"] * (s["chunk_bytes"] + 8),
        ),
        Kernel(
            name="signal",
            entry="signal_sys_v1",
            parameters=_parameters("u64 flag; u32 value is_wait; u64 timeout_ns status; u32 rank peer"),
            block=(32, 32),
            registers=32,
            moved_bytes=lambda s: (4, 4),
        ),
        Kernel(
            name="barrier",
            entry="barrier_sys_v1",
            parameters=_parameters("u64 flags; u32 rank n_ranks epoch; u64 timeout_ns status"),
            block=(32, 32),
            registers=32,
            moved_bytes=lambda s: (4 * s["ranks"], 4 * s["ranks"]),
        ),
        Kernel(
            name="quantize",
            entry="quantize_e4m3_v1",
            parameters=_parameters("u64 x q scales; u32 rows columns scale_stride"),
            block=(32, 1024),
            registers=64,
            moved_bytes=_quantized,
        ),
        Kernel(
            name="dequantize",
            entry="dequantize_e4m3_v1",
            parameters=_parameters("u64 q scales y; u32 rows columns scale_stride"),
            block=(32, 1024),
            registers=64,
            moved_bytes=lambda s: _quantized(s)[::-1],
        ),
        Kernel(
            name="layout",
            entry="layout_v1",
            parameters=_parameters(
                "u64 topk_idx topk_w slots lists rank_counts expert_counts side;"
                "u32 tokens k ranks experts_per_rank side_stride side_offset"
            ),
            block=(1024, 1024),
            registers=64,
            moved_bytes=_layout,
        ),
        Kernel(
            name="notify",
            entry="notify_v1",
            parameters=_parameters(
                "u64 tables rank_counts expert_counts bases received experts;"
                "u32 rank ranks experts_per_rank epoch capacity; u64 timeout_ns status"
            ),
            block=(256, 256),
            registers=64,
            moved_bytes=_notified,
        ),
        Kernel(
            name="dispatch",
            entry="dispatch_sys_v4",
            parameters=_parameters(
                "u64 x side slots bases tables claims;"
                "u32 tokens ranks rank row_bytes side_bytes own group stages depth expected;"
                "u64 timeout_ns status"
            ),
            block=(64, 256),
            registers=64,
            moved_bytes=_dispatched,
            shared_bytes=lambda s: (
                s["stages"] * dispatch_stage_bytes(s["row_bytes"], s["side_bytes"], s["ranks"], s["group"])
            ),
        ),
        Kernel(
            name="dispatch_ll",
            entry="dispatch_ll_v1",
            parameters=_parameters(
                "u64 x topk_idx topk_w slots tables;"
                "u32 tokens k ranks rank experts_per_rank hidden side_bytes most epoch expected;"
                "u64 timeout_ns status"
            ),
            block=(512, 512),
            registers=64,
            moved_bytes=_dispatched_ll,
            shared_bytes=lambda s: s["hidden"] + (s["side_bytes"] + 127) // 128 * 128 + 4 * s["tokens"] + 128,
        ),
        Kernel(
            name="combine",
            entry="combine_sys_v2",
            parameters=_parameters(
                "u64 tables slots bases weights out;"
                "u32 tokens ranks rank part_bytes parts stages epoch; u64 timeout_ns status"
            ),
            block=(256, 768),
            registers=80,
            moved_bytes=_combined,
            shared_bytes=lambda s: s["teams"] * s["stages"] * (s["part_bytes"] + 16),
        ),
        Kernel(
            name="combine_ll",
            entry="combine_ll_v1",
            parameters=_parameters(
                "u64 slots weights out tables; u32 tokens ranks rank hidden most epoch;u64 timeout_ns status"
            ),
            block=(512, 512),
            registers=96,
            moved_bytes=lambda s: (
                s["copies"] * 2 * s["hidden"] + 8 * s["tokens"] * s["ranks"],
                s["tokens"] * 2 * s["hidden"],
            ),
        ),
        Kernel(
            name="dispatch_2hop",
            entry="dispatch_2hop_v1",
            parameters=_parameters(
                "u64 x side weights slots bases node_lists node_counts tables;"
                "u32 tokens ranks node_size rank row_bytes side_bytes chunk stages epoch expected;"
                "u64 timeout_ns status"
            ),
            block=(96, 192),
            registers=80,
            moved_bytes=_dispatched_2hop,
            shared_bytes=lambda s: (
                (3 * s["chunk"] + s["stages"]) * hop_stage_bytes(s["row_bytes"], s["side_bytes"])
                + 20 * s["stages"]
                + 24
            ),
        ),
        Kernel(
            name="combine_2hop",
            entry="combine_2hop_v1",
            parameters=_parameters(
                "u64 tables entries counts node_slots out;"
                "u32 tokens ranks node_size rank entry_bytes relay_part owner_part relay_stages owner_stages"
                " row_bytes chunk epoch; u64 timeout_ns status"
            ),
            block=(768, 768),
            registers=64,
            moved_bytes=_combined_2hop,
            shared_bytes=lambda s: (
                (s["relay_stages"] + 2) * s["relay_part"]
                + s["owner_stages"] * s["owner_part"]
                + 32 * (s["relay_stages"] + s["owner_stages"])
                + 32
            ),
        ),
    )
}
