"""DeepEP's kernels: normal ones, with RDMA once for each node, then NVLink, and those of low latency.

Low-latency kernels are forward calls of inference; no autograd function is published with them.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from msgspec import Struct
from msgspec.structs import replace

from moesim.hwmodels.errors import InputError
from moesim.simulator.dispatchers.protocol import (
    EFA,
    EXPANDS,
    INDICES,
    LAYOUT,
    REDUCES,
    Call,
    Dispatcher,
    EpOperation,
    ExpertBuffers,
    LinkBytes,
    Meter,
    PublishedSms,
    TransferTime,
    direct_bytes,
    published,
    round_up,
    sm_rate,
)
from moesim.simulator.model.operator import Operator

FAMILY = "deepep"

WHOLE_ROW_BYTES = 512
"""Bytes that a warp adds up at a time: combines of rows that are no multiple of it take longer."""

PEERS = 8
"""NVLink peers that the kernels are written for."""

RING_TOKENS: dict[int, tuple[int, int]] = {
    8: (256, 0),
    16: (288, 140),
    32: (288, 128),
    64: (288, 128),
    128: (560, 132),
    160: (720, 132),
}
"""Tokens in a receive ring over NVLink and over RDMA, by EP size; the larger of dispatch and combine.

Source: deepseek-ai/DeepEP deep_ep/buffer.py, defaults of V1 (@567632dd5981; EP160 @04b06f7a299c); the
RDMA ring is rounded up to a whole number of send chunks, as csrc/config.hpp does.
"""


@dataclass(frozen=True)
class TwoHops(Dispatcher):
    """Kernels that cross the network once for each node and continue over NVLink."""

    def seconds(self, call: Call, moved: LinkBytes, meter: Meter) -> TransferTime:
        """Payload = max(NIC bytes / NIC rate, NVLink bytes / NVLink rate, SM time of the rows), after a call.

        The rates come from the profile's curves; the rows include the rank's own (eq. X2, X22). Over adapters
        with curves of their own, calls and rows take further time between nodes (eq. X34). Raises InputError
        where a curve is missing, and as `sm_rate` does.
        """
        operation = call.operation
        sm_s, sm_residual = _sm_seconds(call, moved.logical_nvlink_bytes, meter)
        # Below 20 SMs the SM curve is the limit; the link share was measured with enough SMs.
        fraction, link_residual = meter.read(f"ep.{operation}.scale_up_fraction", max(20, call.sms))
        own = f"ep.{operation}.nic_fraction"
        nic_id = next((n for n in (own, "ep.nic_fraction") if meter.has(n)), f"ep.nic_fraction.{self.name}")
        nic_s, nic_residual = meter.nic(nic_id, moved, call.nodes)
        call_s = error_s = 0.0  # beyond the rows, where the profile's rates do not contain it
        if call.tokens and call.sms and meter.has(f"ep.{operation}.call_time"):
            call_s, call_residual = meter.read(f"ep.{operation}.call_time", call.tokens / call.sms)
            error_s = call_s * call_residual
        if moved.ib_bytes and call.row_bytes and meter.has(f"ep.{operation}.nic_row_time"):
            further_s, further_residual = meter.read(f"ep.{operation}.nic_call_time", call.nodes)
            row_s, row_residual = meter.read(f"ep.{operation}.nic_row_time", call.nodes)
            rows_s = moved.ib_bytes / call.row_bytes * row_s
            nic_s += further_s + rows_s
            error_s += further_s * further_residual + rows_s * row_residual
        elif moved.ib_bytes and meter.links.adapter:
            meter.notes.append(
                f"no curve of {self.name} over {meter.links.adapter}: priced as over InfiniBand"
            )
        return TransferTime(
            launch_s=meter.notify_s(call.nodes) + call_s,
            nic_s=nic_s,
            scale_up_s=max(sm_s, meter.scale_up_s(moved, fraction)),
            best_s=meter.fastest_s(moved),
            residual=max(sm_residual, link_residual, nic_residual),
            call_error_s=error_s,
        )

    def benchmark_s(self, launch_s: float, payload_s: float, notify_s: float, copy_s: float | None) -> float:
        """The time of a call is inside the kernel, and the exchange of counts is a kernel of its own."""
        return launch_s - (notify_s if copy_s is None else 0.0) + payload_s

    def own_buffers(self, call: Call) -> ExpertBuffers:
        """Rings: 377.7 and 336.0 MB for EP64, 20 SMs and rows of 7,168 elements (eq. M12).

        Two SMs form one channel, and dedicated engines, which take no SMs, count as one. Each channel has a
        ring for each NVLink peer, and a send and a receive ring for each node. A slot holds the row, its
        source, 128 expert indices, weights and scales (DeepEP@567632dd5981 csrc/config.hpp).
        """
        ranks = call.ranks
        size = next((s for s in RING_TOKENS if s >= ranks), max(RING_TOKENS))
        note = None
        if ranks > max(RING_TOKENS):
            note = (
                f"communication buffers of EP{ranks} use the ring sizes of EP{size}, the largest that are "
                "published"
            )
        nvl_tokens, rdma_tokens = RING_TOKENS[size]
        channels, peers, nodes = max(call.sms // 2, 1), min(ranks, PEERS), max(ranks // PEERS, 1)
        slot = 2 * call.row + 8 + 128 * (8 + 4 + 4)
        nvlink = channels * peers * (nvl_tokens * slot + (2 * nodes + 3) * 4)
        rdma = 0
        if ranks > PEERS:
            rdma = 2 * channels * nodes * (rdma_tokens * (slot + 16) + (2 * PEERS + 2) * 4)
        return ExpertBuffers(round_up(nvlink), round_up(rdma), note)


# -- the law of rows -------------------------------------------------------------------------------------


def _sm_seconds(call: Call, received_bytes: float, meter: Meter) -> tuple[float, float]:
    """Seconds for which the communication SMs move the rows, and its relative error (eq. X22).

    Across nodes only the width of a row is carried, not the ranks of the group inside one node.
    """
    rate, residual = sm_rate(call, meter)
    if not call.row_bytes or not meter.has(f"ep.{call.operation}.token_time"):
        return received_bytes / rate, residual
    curve = meter.curve(f"ep.{call.operation}.sm_rate")
    most, was = curve.curve.xs[-1], curve.conditions
    if call.sms > most:  # a row keeps one SM busy, so more SMs move more rows until the link is full
        rate *= call.sms / most
        meter.notes.append(
            f"{curve.id}: {call.sms} communication SMs are above the measured {most:g}; each is taken to "
            f"move as much as one of {most:g}, up to the rate of the link"
        )
    if was.row_bytes is None or was.rows_a_token is None or was.ranks is None:
        raise InputError(
            f"{curve.id}: its conditions must state ranks, row_bytes and rows_a_token, because the profile "
            f"has ep.{call.operation}.token_time, which carries it to other rows"
        )
    rows = received_bytes / call.row_bytes
    measured = SentRows(rows / was.rows_a_token, rows, was.row_bytes, was.ranks)
    here = replace(measured, row_bytes=call.row_bytes)
    if call.nodes == 1 and call.tokens:
        here = replace(here, tokens=call.tokens, ranks=call.local)
    seconds = rows * was.row_bytes / rate
    if here.like(measured):
        return seconds, residual
    factor, law_residual = _carried(call.operation, here, measured, meter)
    meter.notes.append(
        f"{curve.id}: measured with {was.ranks} ranks and rows of {was.row_bytes:,.0f} bytes, "
        f"{was.rows_a_token:.2f} a token; {here.ranks} ranks and rows of {here.row_bytes:,.0f} bytes, "
        f"{here.rows / here.tokens:.2f} a token, are assumed to follow the law that v1.2.1 showed on H100"
    )
    return seconds * factor, residual + law_residual


class SentRows(Struct, frozen=True):
    """Tokens of a rank, the rows that it sends or gets back, and the ranks of its group on a node."""

    tokens: float
    rows: float
    row_bytes: float
    ranks: int

    def like(self, other: SentRows) -> bool:
        """Whether the SMs take as long as for other rows, up to rounding of the published counts."""
        close = math.isclose(self.tokens, other.tokens, rel_tol=2e-3) and self.ranks == other.ranks
        return close and math.isclose(self.row_bytes, other.row_bytes)


def _carried(operation: EpOperation, here: SentRows, measured: SentRows, meter: Meter) -> tuple[float, float]:
    """SM time of rows over that of the measured rows by the law, and its relative error."""
    errors = [0.0]

    def read(figure: str, x: float) -> float:
        value, residual = meter.read(f"ep.{operation}.{figure}", x)
        errors.append(residual)
        return value

    def seconds(of: SentRows) -> float:
        a_token = read("token_time", of.ranks)
        if meter.has(f"ep.{operation}.token_rate"):
            a_token += of.row_bytes / read("token_rate", of.ranks)
        a_row = read("row_time", of.ranks) + of.row_bytes / read("row_rate", of.ranks)
        whole = of.tokens * a_token + of.rows * a_row
        if of.row_bytes % WHOLE_ROW_BYTES and meter.has(f"ep.{operation}.ragged_factor"):
            whole *= read("ragged_factor", of.ranks)
        return whole

    return seconds(here) / seconds(measured), max(errors)


# -- low latency ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Direct(Dispatcher):
    """Kernels that send a copy to every chosen expert, straight over NVLink or RDMA (eq. X29)."""

    def traffic(self, call: Call) -> LinkBytes:
        """Every chosen expert gets its own copy (eq. X28)."""
        return direct_bytes(call.tokens, call.choices, call.ranks, call.local, call.row_bytes)

    def seconds(self, call: Call, moved: LinkBytes, meter: Meter) -> TransferTime:
        """Payload = max(NIC bytes / NIC rate, NVLink bytes / NVLink rate), after a call and one latency.

        No exchange of counts comes before it, and the kernel takes the SMs that it needs. Raises InputError
        where a curve is missing.
        """
        fraction, residual = meter.read(f"ep.{call.operation}.scale_up_fraction", call.local)
        nic_s, nic_residual = meter.nic(f"ep.{call.operation}.nic_fraction", moved, call.nodes)
        call_s, call_residual = meter.read(f"ep.{call.operation}.call_time", call.tokens)
        return TransferTime(
            launch_s=call_s + (meter.links.nic_latency_s if call.nodes > 1 else 0.0),
            nic_s=nic_s,
            scale_up_s=meter.scale_up_s(moved, fraction),
            best_s=meter.fastest_s(moved),
            residual=max(residual, nic_residual),
            call_error_s=call_s * call_residual,
        )

    def permuted(self, op: Operator, base: str, call: Call) -> tuple[Operator, ...]:
        """Rows arrive in the order of the experts, and the combine sums the copies of a token itself."""
        return () if base in (LAYOUT, *INDICES, *EXPANDS, *REDUCES) else (op,)

    def own_buffers(self, call: Call) -> ExpertBuffers:
        """Two send and two receive buffers with a slot for every token and expert (eq. M13).

        Any rank may send all of its tokens to one expert, so a receive buffer has as many slots as the
        experts of all ranks times the tokens of one (deepseek-ai/DeepEP@de3a15d511cc csrc/config.hpp,
        LowLatencyLayout).
        """
        row, scales = call.row, call.row // 128
        dispatched, combined = 16 + max(2 * row, row + 4 * scales), 4 * scales + 2 * row
        slots = call.experts * call.tokens
        send = max(call.tokens * dispatched, slots * combined)
        received = slots * max(dispatched, combined)
        return ExpertBuffers(0, round_up(int(2 * (send + received)) + 2 * round_up(4 * call.experts)))


# -- generations -----------------------------------------------------------------------------------------

_CSRC = "deepseek-ai/DeepEP@94a9f8f6 csrc/"
_LOW = "deepseek-ai/DeepEP@de3a15d511cc csrc/kernels/"
ARCHITECTURES = ("Hopper", "Blackwell", "Blackwell Ultra")


def _tuned(commit: str, date: str, more: str = "") -> PublishedSms:
    at = f"deepseek-ai/DeepEP@{commit} "
    config = f"{at}deep_ep/buffer.py: Buffer.num_sms = 20, with which every tuned Config is built{more}"
    test = f"{at}README.md: Buffer.set_num_sms(24); tests/test_internode.py: num_sms = 24"
    return PublishedSms(published(20, config, date), published(24, test, date))


_PEERS = "kernels/configs.cuh: NUM_MAX_NVL_PEERS 8; csrc/deep_ep.cpp: fewer ranks than 8, or a multiple of 8"
DEEPEP_2025_02 = TwoHops(
    name="deepep-2025-02",
    curves=FAMILY,
    words={"megatron": "deepep", "torchtitan": "deepep"},
    architectures=ARCHITECTURES,
    domain_ranks=published(PEERS, f"{_CSRC}{_PEERS}", "2026-05"),
    domains=published(20, f"{_CSRC}kernels/configs.cuh: NUM_MAX_RDMA_PEERS 20", "2026-05"),
    whole_domains=True,
    adapters=("",),
    sms=_tuned("458cdcb22a76", "2025-03", "; DeepSeek-V3 trained with it (arXiv 2412.19437, section 3.5.1)"),
)
DEEPEP_2025_04 = dataclasses.replace(
    DEEPEP_2025_02,
    name="deepep-2025-04",
    adapters=("", *EFA),
    host_threads=1,
    sms=_tuned("007fcfcf9791", "2025-04"),
)
"""Over EFA, NVSHMEM on libfabric carries its messages, from one proxy thread of every process."""
DEEPEP_LOW_LATENCY = Direct(
    name="deepep-low-latency",
    adapters=("", "efa-v2", "efa-v4"),
    curves="deepep-low-latency",
    architectures=ARCHITECTURES,
    row_widths=(2048, 2560, 4096, 5120, 6144, 7168, 8192),  # _LOW launch.cuh: SWITCH_HIDDEN
    most_choices=published(11, f"{_LOW}internode_ll.cu: kNumMaxTopK 11", "2025-10"),
    fills_the_gpu=True,  # _LOW internode_ll.cu: experts / ceil(experts / SMs) blocks of up to 1,024 threads
)
OWN = TwoHops(name="", stand_in=FAMILY, words=DEEPEP_2025_02.words)
"""Kernels of one's own, which a profile names: they move tokens as DeepEP does and hold its buffers, at the
rates of the profile's curves, and have no limits."""
