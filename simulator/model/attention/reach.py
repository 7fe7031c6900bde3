"""How many keys a query attends to: all before it, those of a sliding window, or those of its chunk."""

from __future__ import annotations

from typing import Literal, NamedTuple


class Reach(NamedTuple):
    """Keys that a causal query may attend to; `size` is the window or the chunk in tokens."""

    kind: Literal["full", "window", "chunk"] = "full"
    size: int = 0

    def limits(self, sequence: int) -> bool:
        """Whether any query of a sequence sees fewer keys than full causal attention gives it."""
        return self.kind != "full" and self.size < sequence

    def mean_keys(self, sequence: int) -> float:
        """Keys of a query on average (eq. C2): s / 2; w - w^2 / (2 s) in a window w; c / 2 in a chunk c.

        A position itself counts half, as published FLOP counts take s / 2 for full causal attention. The last
        chunk of a sequence may be shorter.
        """
        if not self.limits(sequence):
            return sequence / 2.0
        if self.kind == "window":
            return self.size - self.size**2 / (2.0 * sequence)
        whole, rest = divmod(sequence, self.size)
        return (whole * self.size**2 + rest**2) / (2.0 * sequence)

    def widest(self, sequence: int) -> int:
        """Most keys of any query, which counts without the causal half take for all of them."""
        return self.size if self.limits(sequence) else sequence


FULL = Reach()
"""Full causal attention."""
