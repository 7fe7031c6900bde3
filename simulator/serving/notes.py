"""What a plan takes without evidence, in sentences: they travel with its result (pure)."""

from __future__ import annotations

from moesim.simulator.model.catalogue import shipped_models
from moesim.simulator.serving.deployment import Deployment, accepted_of, published_formats
from moesim.simulator.serving.prices import WIDER

_DTYPES = {"fp8": "fp8", "nvfp4": "fp4", "mxfp4": "fp4"}


def notes_of(one: Deployment) -> tuple[str, ...]:
    """Assumed formats, formats that the card does not multiply, and drafts that nobody measured."""
    shape, serving, card = one.shape, one.serving, one.cluster.accelerator
    notes = []
    published = published_formats(shape)
    if serving.weights is None and published.note:
        notes.append(f"{shape.name}: {published.note}")
    if serving.weights is None and shape.name not in shipped_models() and shape.published is None:
        notes.append(
            f"weights are taken as BF16, because the file of {shape.name} states no quantization_config: "
            "state serving.weights, and serving.experts where they differ"
        )
    for key, fmt in zip(("weights", "experts"), one.formats, strict=True):
        if key == "experts" and (shape.moe is None or fmt == one.formats[0]):
            continue
        dtype = _DTYPES.get(fmt, "bf16")
        if dtype not in card.peak and dtype in WIDER and fmt != "mxfp4":
            notes.append(f"{card.name} does not multiply {fmt}: {key} count at the rate of a wider format")
    if serving.cache in ("nvfp4", "mxfp4"):
        notes.append(f"no measured kernel reads keys and values in {serving.cache}")
    if drafts := one.pool.draft_tokens:
        measured, longest = accepted_of(shape.name)
        if not shape.mtp_layers:
            notes.append(
                f"{shape.name} has no layer that drafts tokens: one of its own layers stands for a draft "
                "model, without memory"
            )
        if serving.acceptance is None and measured != shape.name:
            notes.append(
                f"accepted drafts of {shape.name} were not measured: those of {measured}; "
                "state serving.acceptance"
            )
        if serving.acceptance is None and drafts > longest:
            notes.append(f"acceptance was measured for {longest} drafts: those after them count as refused")
    return tuple(notes)
