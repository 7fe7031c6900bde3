"""Bytes of the communication buffers on one GPU: expert dispatch and combine, and pipeline transfers."""

from __future__ import annotations

from dataclasses import dataclass

from moesim.simulator.layout.parallel import Layout, tokens_per_gpu
from moesim.simulator.model.dispatchers import dispatcher
from moesim.simulator.model.precision import row_bytes
from moesim.simulator.model.shape import ModelShape
from moesim.simulator.scenario.parallel import ParallelPlan

PEERS = 8
"""NVLink peers that DeepEP's normal kernels are written for."""

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


@dataclass(frozen=True, slots=True)
class ExpertBuffers:
    """Bytes of a dispatcher's two buffers, with a `note` where the ring sizes were extrapolated."""

    nvlink_bytes: int
    rdma_bytes: int
    note: str | None

    @property
    def total_bytes(self) -> int:
        """Bytes of both buffers."""
        return self.nvlink_bytes + self.rdma_bytes


NO_BUFFERS = ExpertBuffers(0, 0, None)


@dataclass(frozen=True, slots=True)
class GroupTokens:
    """Tokens of a rank, and experts and NVLink domains of its group, which size Hybrid-EP's buffers."""

    tokens: float
    experts: int
    nodes: int


def group_tokens(layout: Layout, shape: ModelShape, sequence: int) -> GroupTokens:
    """The figures of a plan; `sequence` are the tokens of one sequence."""
    plan = layout.plan
    nodes = max(1, plan.ep * plan.expert_tp // layout.gpus_per_node)
    return GroupTokens(tokens_per_gpu(plan, sequence), shape.moe.experts if shape.moe else 0, nodes)


def expert_buffers(
    ep: int, row: int, sms: int, kernels: str, group: GroupTokens | None = None
) -> ExpertBuffers:
    """Bytes of the buffers of a dispatcher, for BF16 rows of `row` elements, by its transport (eq. M12, M13).

    Those of two hops are the rings of DeepEP's normal kernels. Both are 0 without expert parallelism and for
    dispatchers by NCCL, whose all-to-all sends from and receives into the tensors of the block, and whose
    channels count as the framework's memory (`layout.memory`).
    """
    if ep <= 1:
        return NO_BUFFERS
    transport = dispatcher(kernels).transport
    if transport in ("all-to-all", "all-gather"):
        return NO_BUFFERS
    if transport in ("domain", "direct"):
        assert group is not None, f"buffers of {kernels} depend on the tokens of its group"
        return _domain_buffers(ep, row, group) if transport == "domain" else _direct_buffers(row, group)
    return _ring_buffers(ep, row, sms)


def _ring_buffers(ep: int, row: int, sms: int) -> ExpertBuffers:
    """Rings of DeepEP's normal kernels: 377.7 and 336.0 MB for EP64, 20 SMs and rows of 7,168 elements.

    Two SMs form one channel, and dedicated engines, which take no SMs, count as one. Each channel has a ring
    for each NVLink peer, and a send and a receive ring for each node. A slot holds the row, its source, 128
    expert indices, weights and scales (DeepEP@567632dd5981 csrc/config.hpp).
    """
    size = next((s for s in RING_TOKENS if s >= ep), max(RING_TOKENS))
    note = None
    if ep > max(RING_TOKENS):
        note = (
            f"communication buffers of EP{ep} use the ring sizes of EP{size}, the largest that are published"
        )
    nvl_tokens, rdma_tokens = RING_TOKENS[size]
    channels, peers, nodes = max(sms // 2, 1), min(ep, PEERS), max(ep // PEERS, 1)
    slot = 2 * row + 8 + 128 * (8 + 4 + 4)
    nvlink = channels * peers * (nvl_tokens * slot + (2 * nodes + 3) * 4)
    rdma = 0
    if ep > PEERS:
        rdma = 2 * channels * nodes * (rdma_tokens * (slot + 16) + (2 * PEERS + 2) * 4)
    return ExpertBuffers(_round_up(nvlink), _round_up(rdma), note)


def _domain_buffers(ep: int, row: int, group: GroupTokens) -> ExpertBuffers:
    """Room for all tokens of all ranks at once, in BF16, with weights for the experts of a domain and scales.

    Dispatch and combine share it. Across domains, rows wait in buffers of the NIC: those that a rank sends,
    and in either direction those for every other domain (deepseek-ai/DeepEP@94a9f8f6, branch hybrid-ep,
    csrc/hybrid_ep/buffer/intranode.cu and internode_doca.cu).
    """
    slot = 2 * row + 4 * (row // 128) + 4 * group.experts // group.nodes
    nvlink = group.tokens * ep * slot
    others = group.nodes - 1
    rdma = group.tokens * (2 * row * (1 + 3 * others) + 4 * group.experts) if others else 0.0
    return ExpertBuffers(_round_up(int(nvlink)), _round_up(int(rdma)), None)


def _direct_buffers(row: int, group: GroupTokens) -> ExpertBuffers:
    """Two send and two receive buffers with a slot for every token and expert (eq. M13).

    Any rank may send all of its tokens to one expert, so a receive buffer has as many slots as the experts of
    all ranks times the tokens of one (deepseek-ai/DeepEP@de3a15d511cc csrc/config.hpp, LowLatencyLayout).
    """
    scales = row // 128
    dispatched, combined = 16 + max(2 * row, row + 4 * scales), 4 * scales + 2 * row
    slots = group.experts * group.tokens
    send = max(group.tokens * dispatched, slots * combined)
    received = slots * max(dispatched, combined)
    return ExpertBuffers(0, _round_up(int(2 * (send + received)) + 2 * _round_up(4 * group.experts)), None)


def pipeline_buffer_bytes(shape: ModelShape, plan: ParallelPlan, sequence: int) -> float:
    """Bytes of the buffers that send and receive activations and gradients between pipeline ranks (eq. M4).

    Rows are in BF16.
    """
    if plan.pp == 1:
        return 0.0
    tokens = plan.microbatch * sequence / plan.cp / (plan.tp if plan.sequence_parallel else 1)
    return 4 * tokens * row_bytes(shape.hidden * shape.residual_streams, "bf16")


def _round_up(size: int) -> int:
    return -(-size // 128) * 128
