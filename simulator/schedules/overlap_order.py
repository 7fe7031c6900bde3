"""Order of the phases inside an overlapped pair as plain data, as DeepSeek and Megatron core post them."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from moesim.hwmodels.frozen import Section
from moesim.simulator.model.operator import Phase

EP_PHASES: frozenset[str] = frozenset({"dispatch F", "combine F", "combine B", "dispatch B"})
SCATTER: Phase = "scatter W"
"""Reduce-scatter of the gradients of a block and micro-batch."""
SHARDING_PHASES: frozenset[str] = frozenset({"gather F", "gather B", SCATTER})
"""Parameter gathers and gradient scatters over replicas, with a communicator and a stream of their own."""
COMMUNICATION_PHASES: frozenset[str] = EP_PHASES | SHARDING_PHASES

FORWARD_CHAIN: tuple[Phase, ...] = ("attn F", "dispatch F", "mlp F", "combine F")
INPUT_CHAIN: tuple[Phase, ...] = ("combine B", "mlp I", "dispatch B", "attn I")
WEIGHT_OF: dict[Phase, Phase] = {"mlp W": "mlp I", "attn W": "attn I"}
"""Input gradient that each weight gradient follows, because it computes an operand of the weight gradient."""


class OverlapOrder(Section):
    """Order of the phases of one layer pair inside an overlapped F&B action.

    Both streams run their list in order, layer pair by layer pair; dependencies do the rest.
    """

    compute: tuple[Phase, ...]
    """Phases of the compute stream, in order."""
    communication: tuple[Phase, ...]
    """Phases of the communication stream, in order."""
    source: str
    """Where the order comes from."""
    weight_gradients: Literal["delayed", "with-input"] = "delayed"
    """`delayed`: a weight gradient is a task of its own, and what needs the input gradient does not wait for
    it. `with-input`: both come out of one backward call, so that the next phase waits for both."""
    pairs: Literal["blocks", "layers"] = "blocks"
    """What the forward and backward sides pair: `blocks` counts embedding and head as well; `layers` runs
    them before or after the pairs, without a partner."""
    lone_backward: Literal["serial", "streams"] = "serial"
    """How a backward without a forward beside it runs: as one chain, or on both streams as in a pair."""
    busy: Literal["transfers", "durations"] = "transfers"
    """Share of the compute of a layer pair that runs beside busy communication SMs: by the number of
    transfers (eq. E6), or by how long they take (eq. E20)."""

    @model_validator(mode="after")
    def _complete(self) -> OverlapOrder:
        want_compute = {"attn F", "mlp I", "mlp W", "mlp F", "attn I", "attn W"}
        if set(self.compute) != want_compute or len(self.compute) != len(want_compute):
            raise ValueError(
                f"compute must name each of {sorted(want_compute)} once, got {list(self.compute)}"
            )
        if self.weight_gradients == "with-input":
            for weight, source in WEIGHT_OF.items():
                if self.compute.index(weight) != self.compute.index(source) + 1:
                    raise ValueError(
                        f"weight_gradients=with-input needs {weight!r} right after {source!r} in compute, "
                        f"got {list(self.compute)}"
                    )
        if set(self.communication) != EP_PHASES or len(self.communication) != 4:
            raise ValueError(
                f"communication must name each of {sorted(EP_PHASES)} once, got {list(self.communication)}"
            )
        return self


OVERLAP_ORDERS: dict[str, OverlapOrder] = {
    "deepseek-v3": OverlapOrder(
        compute=("attn F", "mlp I", "mlp W", "mlp F", "attn I", "attn W"),
        communication=("combine B", "dispatch F", "dispatch B", "combine F"),
        source="deepseek-ai/profile-data@449602428a1b train.json, order of the phases in the trace",
    ),
    "megatron": OverlapOrder(
        compute=("attn F", "mlp I", "mlp W", "mlp F", "attn I", "attn W"),
        communication=("combine B", "dispatch F", "dispatch B", "combine F"),
        source="NVIDIA/Megatron-LM@d98e8a64 megatron/core/models/common/model_chunk_schedule_plan.py, "
        "TransformerLayerSchedulePlan.run and TransformerModelChunkSchedulePlan.run",
        pairs="layers",
        lone_backward="streams",
        busy="durations",
    ),
    "megatron-early-attention": OverlapOrder(
        compute=("attn F", "mlp I", "mlp W", "attn I", "mlp F", "attn W"),
        communication=("combine B", "dispatch F", "dispatch B", "combine F"),
        source="as megatron, with ep_overlap_early_attn_memory_release: the backward of the attention half "
        "before the forward of the experts",
        pairs="layers",
        lone_backward="streams",
        busy="durations",
    ),
}


def joined_weight_gradients(compute: tuple[Phase, ...]) -> tuple[Phase, ...]:
    """The compute list with every weight gradient right after the input gradient that it comes with."""
    after = {source: weight for weight, source in WEIGHT_OF.items()}
    kept = [phase for phase in compute if phase not in WEIGHT_OF]
    return tuple(part for phase in kept for part in (phase, after.get(phase)) if part is not None)
