"""Registry of the kinds of attention. A new kind is a file here, a line in `ATTENTION_KINDS` and a test."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache, reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, PlainValidator, SerializeAsAny, TypeAdapter, ValidationInfo

from moesim.simulator.model.attention.compressed import Compressed
from moesim.simulator.model.attention.dsa import DSA, BlockSparse
from moesim.simulator.model.attention.grouped_query import GQA, ChunkedAttention, SlidingAttention
from moesim.simulator.model.attention.mixers import KDA, GatedDelta, Lightning, Mamba, Mamba2
from moesim.simulator.model.attention.mla import MLA
from moesim.simulator.model.attention.protocol import Attention

__all__ = [
    "ATTENTION_KINDS",
    "DSA",
    "GQA",
    "KDA",
    "MLA",
    "AnyAttention",
    "Attention",
    "BlockSparse",
    "ChunkedAttention",
    "Compressed",
    "GatedDelta",
    "Lightning",
    "Mamba",
    "Mamba2",
    "SlidingAttention",
]

ATTENTION_KINDS: dict[str, type[Attention]] = {
    "mla": MLA,
    "gqa": GQA,
    "gated_delta": GatedDelta,
    "kda": KDA,
    "mamba2": Mamba2,
    "mamba": Mamba,
    "lightning": Lightning,
    "dsa": DSA,
    "block_sparse": BlockSparse,
    "compressed": Compressed,
    "sliding": SlidingAttention,
    "chunked": ChunkedAttention,
}
"""Class of each kind, by the value of `kind` in model files."""


def _union(kinds: Iterable[type[Attention]]) -> Any:
    return reduce(or_, kinds)


@lru_cache(maxsize=8)
def _reader(kinds: tuple[type[Attention], ...]) -> TypeAdapter[Attention]:
    union: Any = Annotated[_union(kinds), Field(discriminator="kind")]
    return TypeAdapter(union)


def _of_registered_kind(value: Any, info: ValidationInfo) -> Attention:
    """Read an attention of any kind that is registered at the time of the call."""
    if isinstance(value, Attention):
        return value
    return _reader(tuple(ATTENTION_KINDS.values())).validate_python(value, context=info.context)


if TYPE_CHECKING:
    AnyAttention = Attention
else:  # the validator decides; the union serves the messages about unknown keys
    AnyAttention = Annotated[
        _union(ATTENTION_KINDS.values()), PlainValidator(_of_registered_kind), SerializeAsAny()
    ]
"""Field type of an attention of any kind: a mapping with `kind`, checked as that kind."""
