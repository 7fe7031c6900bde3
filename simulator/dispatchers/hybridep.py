"""Hybrid-EP: TMA inside an NVLink domain and RDMA once for each domain between them (eq. X23)."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec.structs import replace

from moesim.simulator.dispatchers.deepep import ARCHITECTURES
from moesim.simulator.dispatchers.protocol import (
    EXPANDS,
    INDICES,
    LAYOUT,
    REDUCES,
    Call,
    CollectiveTime,
    Dispatcher,
    ExpertBuffers,
    LinkBytes,
    Meter,
    PublishedSms,
    TransferTime,
    published,
    round_up,
    sm_rate,
)
from moesim.simulator.model.operator import Operator

ROUTING_MAP = "routing map before a dispatch"


@dataclass(frozen=True)
class Domains(Dispatcher):
    """Kernels for domains of any size, whose SMs move rows inside one and hand rows to the NICs."""

    def seconds(self, call: Call, moved: LinkBytes, meter: Meter) -> TransferTime:
        """Payload = max(NIC bytes / NIC rate, NVLink bytes / NVLink rate, SM time of the rows), after a call.

        A forward dispatch, which has no routing of an earlier call, first gathers the routing map of all
        ranks, a byte for each of their tokens and experts; its scan is one of the block's operators. Raises
        InputError where a curve is missing, and as `sm_rate` does.
        """
        operation = call.operation
        sm_s, sm_residual = _sm_seconds(call, moved, meter)
        fraction, link_residual = meter.read(f"ep.{operation}.scale_up_fraction", call.local)
        nic_s, nic_residual = meter.nic("ep.nic_fraction", moved, call.nodes)
        call_s, call_residual = meter.read(f"ep.{operation}.call_time", call.ranks)
        map_bytes = call.tokens * call.experts if call.phase == "dispatch F" else 0.0
        launch_s = meter.notify_s(call.nodes) + call_s
        before: tuple[tuple[str, CollectiveTime], ...] = ()
        if map_bytes:
            gather = meter.collective("all_gather", map_bytes * call.ranks, call)
            launch_s, before = launch_s + max(gather.nic_s, gather.scale_up_s), ((ROUTING_MAP, gather),)
        return TransferTime(
            launch_s=launch_s,
            nic_s=nic_s,
            scale_up_s=max(sm_s, meter.scale_up_s(moved, fraction)),
            best_s=meter.fastest_s(moved),
            residual=max(sm_residual, link_residual, nic_residual),
            call_error_s=call_s * call_residual,
            before=before,
        )

    def benchmark_s(self, launch_s: float, payload_s: float, notify_s: float, copy_s: float | None) -> float:
        """The kernel alone is the payload; its Python interface copies rows out of, or into, the buffers."""
        return payload_s if copy_s is None else launch_s - notify_s + payload_s + copy_s

    def permuted(self, op: Operator, base: str, call: Call) -> tuple[Operator, ...]:
        """The scan that makes the layout reads the routing map and writes the order of the rows too."""
        if base == LAYOUT:
            return (replace(op, bytes_read=call.tokens * call.experts * call.ranks),)
        return () if base in INDICES or (call.fused and base in (*EXPANDS, *REDUCES)) else (op,)

    def own_buffers(self, call: Call) -> ExpertBuffers:
        """Room for all tokens of all ranks, in BF16, with weights for its domain's experts, and scales.

        Dispatch and combine share it. Across domains, rows wait in buffers of the NIC: those that a rank
        sends, and in either direction those for every other domain (deepseek-ai/DeepEP@94a9f8f6, branch
        hybrid-ep, csrc/hybrid_ep/buffer/intranode.cu and internode_doca.cu).
        """
        row = call.row
        slot = 2 * row + 4 * (row // 128) + 4 * call.experts // call.nodes
        nvlink = call.tokens * call.ranks * slot
        others = call.nodes - 1
        rdma = call.tokens * (2 * row * (1 + 3 * others) + 4 * call.experts) if others else 0.0
        return ExpertBuffers(round_up(int(nvlink)), round_up(int(rdma)))


def _sm_seconds(call: Call, moved: LinkBytes, meter: Meter) -> tuple[float, float]:
    """Seconds for which the SMs move the rows of both hops, and its relative error.

    A fused permutation writes a row for each expert of a rank that a token chose, not one for the rank.
    """
    rate, residual = sm_rate(call, meter)
    written = 1.0
    if call.fused:
        assert call.targets is not None
        written = call.choices / call.targets().distinct_gpus
    rows = moved.logical_nvlink_bytes / call.row_bytes * written
    name = f"ep.{call.operation}.row_time"
    if meter.has(f"{name}.{call.wire}"):
        name = f"{name}.{call.wire}"
    row_s, row_residual = meter.read(name, call.local)
    seconds = rows * (call.row_bytes / rate + row_s / call.sms)
    if moved.ib_bytes and meter.has(f"ep.{call.operation}.nic_sm_rate"):
        nic_row_s, _ = meter.read(f"ep.{call.operation}.nic_row_time", call.nodes)
        nic_rate, _ = meter.read(f"ep.{call.operation}.nic_sm_rate", call.sms)
        sent = moved.ib_bytes / call.row_bytes
        seconds += sent * nic_row_s / call.sms + moved.ib_bytes / nic_rate
    return seconds, max(residual, row_residual)


_SOURCE = "deepseek-ai/DeepEP@94a9f8f6 (branch hybrid-ep) "
_CONFIG = f"{_SOURCE}csrc/hybrid_ep/config.cuh: "
_TABLES = f"{_SOURCE}docs/README_Hybrid-EP.md: tables with 16 and 32 SMs; NVIDIA-NeMo/Megatron-Bridge@v0.6.0"

HYBRIDEP = Domains(
    name="hybridep",
    curves="hybridep",
    words={"megatron": "hybridep"},
    architectures=ARCHITECTURES,
    adapters=("",),  # _SOURCE csrc/hybrid_ep/internode_doca.cu: DOCA's queues of InfiniBand and RoCE NICs
    domain_ranks=published(72, f"{_CONFIG}MAX_NUM_OF_RANKS_PER_NODE 72", "2026-05"),
    tokens_across=published(
        21844,
        f"{_CONFIG}3 tokens + 1 work requests below 65,536 across domains",
        "2026-05",
    ),
    pads_rows=True,
    fuses_permutation=True,
    # _SOURCE csrc/hybrid_ep/executor/executor.cu: dispatch_postprocess, combine_preprocess
    permutes_in_call=True,
    sms=PublishedSms(
        published(16, f"{_TABLES} recipes: 16", "2026-05"),
        published(32, f"{_TABLES} perf_recipes: 32", "2026-05"),
    ),
)
