"""Bytes that decoding keeps of a sequence, by kind of attention (pure)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from moesim.simulator.model.precision import BYTES_PER_ELEMENT
from moesim.simulator.model.shape import ModelShape


@dataclass(frozen=True, slots=True)
class StateSize:
    """What one kind of attention keeps of one sequence over all of its layers."""

    name: str | None
    """Name in `attentions`; None in a model with one kind."""
    kind: str
    layers: int
    bytes_per_token: float
    """Bytes of one more token behind the last length; 0 for windows and recurrent states."""
    bytes_at: tuple[float, ...]
    """Bytes at every length that was asked for."""


def state_sizes(shape: ModelShape, lengths: Sequence[int], dtype: str = "bf16") -> tuple[StateSize, ...]:
    """Keys, values and recurrent states of one sequence at several lengths, by kind of attention."""
    element = BYTES_PER_ELEMENT[dtype]
    layers = Counter(kind.partition("/")[2] or None for kind in shape.layer_kinds)
    sizes = []
    for name, attention in shape.attention_by_name.items():
        count = layers[name]
        at = [count * attention.state_bytes(length, element) for length in lengths]
        more = count * attention.state_bytes(max(lengths) + 1, element) - at[lengths.index(max(lengths))]
        sizes.append(StateSize(name, attention.kind, count, more, tuple(at)))
    return tuple(sizes)
