"""Checks descriptions whose `kind` decides which keys `fabric` has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moesim.hwmodels.topologies.spec import TopologySpec
from moesim.hwmodels.validation import nearest


def with_kind(data: Mapping[str, Any], specs: Mapping[str, TopologySpec]) -> dict[str, Any]:
    """The mapping with its `kind` written into its `fabric`, where pydantic looks for it.

    Raises ValueError for an unknown kind, for a missing fabric, and for one that the kind does not have.
    """
    kind, fabric = data.get("kind"), data.get("fabric")
    if not isinstance(kind, str):
        return dict(data)  # pydantic reports the error
    known = sorted(specs)
    if kind not in known:
        raise ValueError(
            f"unknown kind {kind!r}{nearest(kind, known)}; the known ones are {', '.join(known)}"
        )
    if specs[kind].fabric is None:
        if fabric is not None:
            raise ValueError(f"a network of kind {kind!r} has no fabric: leave the key out")
        return dict(data)
    if fabric is None:
        raise ValueError(f"a network of kind {kind!r} needs the key fabric")
    return {**data, "fabric": {**fabric, "kind": kind} if isinstance(fabric, Mapping) else fabric}
