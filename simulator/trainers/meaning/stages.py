"""Meaning of the arguments on pipeline stages: virtual stages, uneven stages and layouts."""

from __future__ import annotations

from typing import Any

from moesim.hwmodels.errors import InputError
from moesim.simulator.model.shape import ModelShape
from moesim.simulator.schedules import SCHEDULES, name_from
from moesim.simulator.schedules.interleaved import per_round
from moesim.simulator.trainers.meaning.contradictions import FIRST, LAST, LAYERS, LAYOUT, STAGES
from moesim.simulator.trainers.meaning.given import Given
from moesim.simulator.trainers.megatron.layout import expand_layout, layers_of_layout, mtp_stage_of_layout

EMBEDDING = "account-for-embedding-in-pipeline-split"
LOSS = "account-for-loss-in-pipeline-split"
ROUND = "microbatch-group-size-per-virtual-pipeline-stage"

STAGE_ARGUMENTS = ("pipeline-model-parallel-size", STAGES, LAYERS, LAYOUT, FIRST, LAST, EMBEDDING, LOSS)
"""Arguments by which a file says something about its pipeline stages."""


def read_stages(given: Given, shape: ModelShape, pp: int, in_part: bool = False) -> None:
    """Set parallel.vpp, schedule and stages as Megatron-LM spreads the layers over the pipeline.

    `in_part` says that the file holds a part of the arguments: layers that do not divide are balanced then.

    Raises InputError where layers do not divide as Megatron-LM needs it.
    """
    stages: dict[str, Any] = {}
    if given.has(LAYOUT):
        text = given.text(LAYOUT, "")
        vpp, stages, note = _of_layout(given, shape, pp, text)
        if given.integer(STAGES, vpp) != vpp:
            raise InputError(
                f"{given.place(STAGES)} and {given.place(LAYOUT)} contradict each other: the layout has "
                f"{vpp} stages a rank; correct one"
            )
        given.set("parallel.vpp", vpp, LAYOUT, STAGES)
        _set_stages(given, stages, (LAYOUT,), note)
    else:
        vpp = _virtual_stages(given, shape.n_layers, pp)
        given.set("parallel.vpp", vpp, STAGES, LAYERS)
        names = [name for name in (FIRST, LAST, EMBEDDING, LOSS) if given.has(name)]
        if in_part and not names and shape.n_layers % (pp * vpp):
            text = (
                "the direction is unknown: the file does not say which layers a stage has; they are balanced"
            )
            given.explain(FIRST, "not priced", text)
        elif pp > 1:
            layers = list(_uneven(given, shape.n_layers, pp, vpp))
            note = "" if names else "Megatron-LM spreads layers evenly"
            _set_stages(given, {"layers": layers}, tuple(names) or (FIRST,), note)
    if vpp > 1 and pp == 1:
        name = next(name for name in (LAYOUT, STAGES, LAYERS) if given.has(name))
        raise InputError(f"{given.place(name)}: virtual stages need --pipeline-model-parallel-size above 1")
    if not given.has("schedule"):
        arguments = ("pipeline-model-parallel-size", STAGES, LAYERS)
        given.set("schedule", name_from("megatron-lm", free_vpp=vpp > 1), *arguments)


def read_schedule(given: Given) -> None:
    """Set the schedule that a name of torch.distributed.pipelining stands for; InputError for another."""
    if given.has("schedule"):
        known = {spec.names_elsewhere.get("torch"): spec.name for spec in SCHEDULES.values()}
        names = [name for name in known if name is not None]
        given.set("schedule", known[given.text("schedule", "", names)], "schedule")


def read_rounds(given: Given, pp: int, microbatches: int) -> None:
    """Explain the micro-batches of a round of interleaved stages: those that are simulated, or others."""
    if not given.has(ROUND):
        return
    simulated = per_round(pp, max(1, microbatches))
    if given.integer(ROUND, pp) == simulated:
        given.explain(ROUND, "key", f"a round has {simulated} micro-batches, as moesim simulates it")
    else:
        given.explain(
            ROUND, "not priced", f"the direction is unknown: moesim simulates rounds of {simulated}"
        )


def _set_stages(given: Given, stages: dict[str, Any], names: tuple[str, ...], note: str) -> None:
    for key, value in stages.items():
        given.set(f"stages.{key}", value, *names, note=note)


def _accounted(given: Given) -> tuple[int, int]:
    return int(given.flag(EMBEDDING)), int(given.flag(LOSS))


def _virtual_stages(given: Given, n_layers: int, pp: int) -> int:
    if given.has(STAGES):
        return given.integer(STAGES, 1, most=1000)
    if not given.has(LAYERS):
        return 1
    each, total = given.integer(LAYERS, 1, most=1000), n_layers + sum(_accounted(given))
    if total % (pp * each):
        raise InputError(
            f"{given.place(LAYERS)}: {total} layers over {pp} pipeline ranks do not divide into virtual "
            f"stages of {each}; Megatron-LM refuses this"
        )
    return total // (pp * each)


def _uneven(given: Given, n_layers: int, pp: int, vpp: int) -> tuple[int, ...]:
    """Layers of every stage in order: all ranks of the first virtual stage, then those of the next."""
    ends = {0: given.integer(FIRST, 0) if given.has(FIRST) else None}
    ends[pp - 1] = given.integer(LAST, 0) if given.has(LAST) else None
    fixed = {rank: n for rank, n in ends.items() if n is not None}
    before, after = _accounted(given)
    total = n_layers + (before if 0 not in fixed else 0) + (after if pp - 1 not in fixed else 0)
    others, left = pp - len(fixed), total - sum(fixed.values())
    if left < 0 or (others and left % (others * vpp)) or (not others and left):
        raise InputError(
            f"{left} layers do not divide over {others} pipeline ranks with {vpp} virtual stages each, which "
            f"Megatron-LM needs; state {_dashes(STAGES)}, {_dashes(LAYOUT)}, or other sizes"
        )
    ranks = [fixed.get(rank, left // others if others else 0) for rank in range(pp)]
    for rank, layers in fixed.items():
        if layers % vpp:
            raise InputError(
                f"{given.place(FIRST if rank == 0 else LAST)}: {layers} layers do not divide into {vpp} "
                "virtual stages"
            )
    stages = [ranks[rank] // vpp for _ in range(vpp) for rank in range(pp)]
    stages[0] -= before if 0 not in fixed else 0
    stages[-1] -= after if pp - 1 not in fixed else 0
    return tuple(stages)


def _of_layout(given: Given, shape: ModelShape, pp: int, text: str) -> tuple[int, dict[str, Any], str]:
    """Virtual stages, keys of the scenario's section stages, and a note."""
    letters = expand_layout(text)
    n_stages, layers = layers_of_layout(text)
    if n_stages % pp:
        raise InputError(
            f"{given.place(LAYOUT)}: has {n_stages} stages, not a multiple of "
            f"--pipeline-model-parallel-size {pp}"
        )
    for letter, count, what in (
        ("t", shape.n_layers, "decoder layers (t)"),
        ("m", shape.mtp_layers, "multi-token-prediction modules (m)"),
        ("E", 1, "embedding (E)"),
        ("L", 1, "loss (L)"),
    ):
        if letters.count(letter) != count:
            raise InputError(
                f"{given.place(LAYOUT)}: has {letters.count(letter)} of {what}, and the model {count}"
            )
    vpp = n_stages // pp
    if layers is not None:
        mtp = mtp_stage_of_layout(text)
        return vpp, {"layers": list(layers)} | ({} if mtp is None else {"mtp": mtp}), ""
    note = (
        "moesim keeps the embedding on the first stage, the loss on the last and all MTP modules on one "
        f"behind the layers, so the {n_stages} stages are balanced instead"
    )
    given.explain(LAYOUT, "not priced", f"the direction is unknown: {note}")
    return vpp, {}, ""


def _dashes(name: str) -> str:
    return f"--{name}"
