"""Time of one call of DSA, of compressed attention or of hyper-connections in inference (pure)."""

from __future__ import annotations

from moesim.hwmodels.accelerator import Accelerator
from moesim.hwmodels.calibration import CalibrationProfile
from moesim.hwmodels.errors import InputError
from moesim.simulator.cost.attention_module import ModuleTime, module_seconds
from moesim.simulator.model.attention.compressed import Compressed
from moesim.simulator.model.attention.compressed_inference import compressed_operators
from moesim.simulator.model.attention.dsa import DSA
from moesim.simulator.model.attention.dsa_inference import dsa_operators, runs_dense
from moesim.simulator.model.attention.inference import AttentionCall
from moesim.simulator.model.attention.protocol import Attention
from moesim.simulator.model.operator import Operator


def call_operators(attention: Attention, hidden: int, call: AttentionCall) -> list[Operator]:
    """Operators of one call; raises InputError for a kind of attention without an inference module."""
    if isinstance(attention, DSA):
        return dsa_operators(attention, hidden, call)
    if isinstance(attention, Compressed):
        return compressed_operators(attention, hidden, call)
    raise InputError(
        f"attention of kind {attention.kind!r} has no inference module; the kinds dsa and compressed have"
    )


def call_overheads(attention: Attention, call: AttentionCall) -> tuple[str, tuple[str, ...], str | None]:
    """Names of a call's constants: of the projections, of the fixed parts, and of the host's time."""
    if isinstance(attention, Compressed):
        kind = "window" if not attention.ratio else "csa" if attention.indexer is not None else "hca"
        return f"{call.stack}-compressed", (f"{call.stack}-{kind}",), None
    if call.phase == "prefill":
        dense = isinstance(attention, DSA) and runs_dense(attention, call)
        host = f"{call.stack}-dsa{'-dense' if dense else ''}-host"
        return call.stack, (f"{call.stack}-dsa-prefill",), host
    shared = isinstance(attention, DSA) and attention.indexer.shared
    names = [f"{call.stack}-dsa{'-shared' if shared else ''}-{call.kv}-decode"]
    if isinstance(attention, DSA) and not shared and call.length > attention.indexer.top_k:
        names.append(f"{call.stack}-dsa-selection")
    return call.stack, tuple(names), None


def call_seconds(
    attention: Attention,
    hidden: int,
    call: AttentionCall,
    accelerator: Accelerator,
    profile: CalibrationProfile,
) -> ModuleTime:
    """Seconds of one attention module of a layer on one GPU (eq. A6).

    Raises InputError for a kind without an inference module, a tensor parallelism that does not divide the
    heads, and a profile without the constants of the framework.
    """
    stack, overheads, host = call_overheads(attention, call)
    operators = call_operators(attention, hidden, call)
    return module_seconds(operators, stack, overheads, host, accelerator, profile)
