"""The tables of `moesim models` and `moesim import hf`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from moesim.cli.console import print_json, print_raw, print_table, print_text
from moesim.hwmodels.summary_text import short

if TYPE_CHECKING:
    from moesim.simulator.cost.evidence import PartEvidence
    from moesim.simulator.model.catalogue import CatalogueRow
    from moesim.simulator.model.huggingface import ImportedModel
    from moesim.simulator.model.shape import ModelShape

PROFILE = "h200-8gpu"
"""Profile whose evidence the table names where the user names none."""
_MOST_LISTED = 1000
_MOST_SHOWN = 60
"""Characters of one value in the table of an imported configuration."""


def print_models(search: str | None, profile: str | None, as_json: bool) -> None:
    """Print the shipped models, or those that a search finds, with the evidence that prices them."""
    from moesim.simulator.cost.evidence import evidence_text
    from moesim.simulator.model.catalogue import catalogue, context_text, load_model
    from moesim.simulator.model.catalogue import search as found_by

    rows = catalogue() if search is None else found_by(catalogue(), search)
    evidence = {row.name: _evidence_of(load_model(row.name), profile or PROFILE) for row in rows}
    if as_json:
        print_json([_row_object(row, evidence[row.name]) for row in rows])
        return
    if not rows:
        print_text(f"no shipped model has {search!r} in its name, attention, experts or source")
        return
    cells = [
        (
            row.name, short(row.parameters_total, 4), short(row.parameters_activated, 4), str(row.layers),
            row.attention, row.experts, context_text(row.context), evidence_text(evidence[row.name])
            + (f"; not modelled: {len(row.not_modelled)}" if row.not_modelled else ""),
        )
        for row in rows
    ]  # fmt: skip
    headers = (
        "name", "total", "activated", "layers", "attention", "experts", "context",
        f"priced in profile {profile or PROFILE} from",
    )  # fmt: skip
    print_table(headers, cells, right=(1, 2, 3, 6))
    print_text(
        f"{len(rows)} of {len(catalogue())} shipped models; moesim models NAME shows one with its source"
    )


def print_model(name: str, profile: str | None, as_json: bool) -> None:
    """Print the sizes, the layers, the states and the shape of one model."""
    from moesim.simulator.cost.evidence import evidence_text
    from moesim.simulator.model.catalogue import context_text, experts_text, load_model, pattern_text
    from moesim.simulator.model.huggingface import to_yaml

    shape = load_model(name)
    evidence = _evidence_of(shape, profile or PROFILE)
    if as_json:
        print_json(model_object(shape) | {"priced_from": _evidence_objects(evidence)})
        return
    context = None if shape.numerics is None else shape.numerics.context
    print_text(f"{shape.name}: {shape.source.reference}, {shape.source.date}\n")
    print_text(f"layers    {pattern_text(shape)}")
    print_text(f"experts   {experts_text(shape)}")
    print_text(f"context   {context_text(context) or 'not known'}")
    print_text(f"priced    in profile {profile or PROFILE}: {evidence_text(evidence)}")
    if (published := _published(shape)) is not None:
        print_text(f"published {published}")
    for text in shape.not_modelled:
        print_text(f"not modelled: {text}")
    print_text("")
    print_sizes(shape)
    _print_states(shape, context)
    print_raw("\n" + to_yaml(shape, width=62))


def print_import(imported: ImportedModel, as_json: bool) -> None:
    """Print how a config.json was read, and the sizes of its model."""
    shape = imported.shape
    if as_json:
        understood = [{"key": u.key, "value": u.value, "meaning": u.meaning} for u in imported.understood]
        print_json({**model_object(shape), "understood": understood, "ignored": list(imported.ignored)})
        return
    print_text(f"{shape.name}: {shape.source.reference}\n\nunderstood")
    rows = [(f"  {u.key}", _shown(u.value), u.meaning) for u in imported.understood]
    print_table(("key", "value", "as"), rows)
    print_text(f"\nignored, no part in time or memory: {', '.join(imported.ignored) or 'nothing'}")
    for text in shape.not_modelled:
        print_text(f"not modelled: {text}")
    print_text("")
    print_sizes(shape)


def _shown(value: object) -> str:
    """A value of a configuration on one short line; a list with one entry a layer as its pattern."""
    from moesim.simulator.model.huggingface.reader import shortest_pattern

    text = str(value)
    if isinstance(value, list) and 0 < len(value) <= _MOST_LISTED:
        text = ", ".join(shortest_pattern([str(entry) for entry in value]))
    return text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN - 3]}..."


def print_sizes(shape: ModelShape) -> None:
    """Print the parameters of a shape, together and by component."""
    from moesim.simulator.model.counts import parameters_by_component

    parts = {f"  {name}": n for name, n in parameters_by_component(shape).as_dict().items() if n}
    rows = [(name.replace("_", " "), f"{n:,}", short(n, 4)) for name, n in (_counts(shape) | parts).items()]
    print_table(("count", "exact", ""), rows, right=(1, 2))


def _published(shape: ModelShape) -> str | None:
    """The published sizes of a shipped model beside the counted ones; None for another model."""
    from moesim.simulator.model.catalogue import load_model, shipped_models
    from moesim.simulator.model.counts import compare_activated, compare_total, published_sizes

    if shape.name not in shipped_models() or load_model(shape.name) != shape:
        return None
    size = published_sizes()[shape.name]
    total, activated = compare_total(shape, size), compare_activated(shape, size)
    more = "" if activated is None else f", {activated.published.value} activated ({activated.error:+.2%})"
    left_out = f"; {size.activated_left_out}" if size.activated_left_out else ""
    return f"{size.total.value} ({total.error:+.2%} counted by the same rule){more}{left_out}; {size.source}"


def _print_states(shape: ModelShape, context: int | None) -> None:
    """Print what decoding keeps of one sequence in 16 bits, by kind of attention."""
    from moesim.simulator.model.catalogue import context_text
    from moesim.simulator.model.shape import state_sizes

    lengths = [4096] if context is None or context <= 4096 else [4096, context]
    rows = state_sizes(shape, lengths)
    print_text("\nkeys, values and states of one sequence in BF16, over all layers of a kind")
    further = (f"{context_text(n)} tokens" for n in lengths)
    headers = ("attention", "kind", "layers", "a further token", *further)
    cells = [
        (
            row.name or row.kind, row.kind, str(row.layers), _bytes(row.bytes_per_token),
            *(_bytes(size) for size in row.bytes_at),
        )
        for row in rows
    ]  # fmt: skip
    print_table(headers, cells, right=(2, 3, *range(4, 4 + len(lengths))))


def _bytes(size: float) -> str:
    for scale, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= scale:
            return f"{size / scale:.3g} {unit}"
    return f"{size:.0f} B"


def _counts(shape: ModelShape) -> dict[str, int]:
    from moesim.simulator.model import counts

    return {
        "parameters_total": counts.parameters_total(shape),
        "parameters_activated": counts.parameters_activated(shape, embedding=True),
        "parameters_activated_without_embedding": counts.parameters_activated(shape, embedding=False),
        "parameters_mtp": counts.parameters_mtp(shape),
    }


def model_object(shape: ModelShape) -> dict[str, Any]:
    """The sizes and the shape of a model as plain data."""
    from moesim.simulator.model.catalogue import row_of
    from moesim.simulator.model.counts import parameters_by_component

    row = row_of(shape)
    return {
        "name": shape.name,
        **_counts(shape),
        "parameters_by_component": parameters_by_component(shape).as_dict(),
        **{key: getattr(row, key) for key in ("attention", "feed_forward", "experts")},
        "shape": shape.model_dump(mode="json", exclude_none=True),
    }


def _row_object(row: CatalogueRow, evidence: Sequence[PartEvidence]) -> dict[str, Any]:
    from moesim.simulator.model.catalogue import load_model

    same = ("layers", "hidden", "attention", "feed_forward", "experts", "context")
    return {
        "name": row.name,
        **_counts(load_model(row.name)),
        **{key: getattr(row, key) for key in same},
        "priced_from": _evidence_objects(evidence),
        "not_modelled": list(row.not_modelled),
        "source": row.source,
    }


def _evidence_of(shape: ModelShape, profile: str) -> tuple[PartEvidence, ...]:
    from moesim.hwmodels.accelerator import load_accelerator
    from moesim.hwmodels.calibration import load_profile
    from moesim.simulator.cost.evidence import model_evidence

    rates = load_profile(profile)
    accelerator = load_accelerator("h200-sxm" if rates.accelerator == "any" else rates.accelerator)
    return model_evidence(shape, accelerator, rates)


def _evidence_objects(evidence: Sequence[PartEvidence]) -> list[dict[str, Any]]:
    return [
        {"part": e.part, "evidence": e.evidence, "share": round(e.share, 4), "entries": list(e.entries)}
        for e in evidence
    ]
