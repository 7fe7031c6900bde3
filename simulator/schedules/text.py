"""Reads and writes schedules as CSV and JSON, and infers their sizes and routes from the actions."""

from __future__ import annotations

import csv
import io
import json
from itertools import product

from pydantic import BaseModel, ConfigDict, ValidationError

from moesim.hwmodels.errors import InputError
from moesim.simulator.schedules.action import Schedule, Step, actions_of, bidirectional_routes, parse_step
from moesim.simulator.schedules.spec import validate

_MAX_RANKS = 65_536


class _Document(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: str
    pp: int
    microbatches: int
    ranks: list[list[str]]


def to_csv(schedule: Schedule) -> str:
    """Write the compute-only format of `torch.distributed.pipelining`: one line per rank, one cell per step.

    PyTorch's runtime rejects a bidirectional schedule, in which two ranks hold each stage.
    """
    return "".join(",".join(map(str, steps)) + "\n" for steps in schedule.ranks)


def from_csv(text: str, name: str = "csv", source: str = "schedule CSV") -> Schedule:
    """Read and validate the CSV of a schedule; empty cells (idle slots) and trailing blank lines are skipped.

    Sizes and placement are inferred from the actions. Raises InputError naming `source`, line and cell.
    """
    try:
        rows = list(csv.reader(io.StringIO(text.removeprefix("\ufeff"), newline=""), strict=True))
    except csv.Error as error:
        raise InputError(
            f"{source}: not a CSV text ({error}); write one line a rank, cells such as 0F0."
        ) from None
    while rows and not any(cell.strip() for cell in rows[-1]):
        rows.pop()
    ranks = tuple(
        tuple(
            parse_step(cell, f"{source}: line {line}, cell {column}")
            for column, cell in enumerate(row, start=1)
            if cell.strip()
        )
        for line, row in enumerate(rows, start=1)
    )
    return infer_schedule(name, ranks, source)


def to_json(schedule: Schedule) -> str:
    """Write one JSON object with name, pp, microbatches and ranks (lists of step texts)."""
    ranks = [[str(step) for step in steps] for steps in schedule.ranks]
    sizes = {"name": schedule.name, "pp": schedule.pp, "microbatches": schedule.microbatches}
    return json.dumps(sizes | {"ranks": ranks})


def from_json(text: str, source: str = "schedule JSON") -> Schedule:
    """Read and validate the JSON of a schedule. Raises InputError naming `source` and the place in it."""
    try:
        document = _Document.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "top level"
        raise InputError(
            f"{source}: {place}: {first['msg']}; expected an object with name (text), pp, microbatches "
            '(whole numbers) and ranks, such as [["0F0", "0B0"]].'
        ) from None
    except UnicodeError:
        raise InputError(f"{source}: not valid Unicode text; write the file as UTF-8.") from None
    ranks = tuple(
        tuple(parse_step(cell, f"{source}: ranks.{r}.{position}") for position, cell in enumerate(row))
        for r, row in enumerate(document.ranks)
    )
    schedule = infer_schedule(document.name, ranks, source)
    for key in ("pp", "microbatches"):
        written, found = getattr(document, key), getattr(schedule, key)
        if written != found:
            raise InputError(
                f"{source}: {key}={written}, but the ranks listed have {found}; write {key}={found}."
            )
    return schedule


def infer_schedule(name: str, ranks: tuple[tuple[Step, ...], ...], source: str = "schedule") -> Schedule:
    """Infer sizes and routes of a schedule from its forwards, and validate it.

    If every stage is on one rank the schedule has a single route of any pattern; if the two halves of the
    micro-batches have mirrored routes it is bidirectional. Bidirectional schedules await sends, as DualPipe's
    code does; all others do not, as in PyTorch's runtime. Raises InputError.
    """
    forwards = {
        (action.stage, action.microbatch): rank
        for rank, steps in enumerate(ranks)
        for step in steps
        for action in actions_of(step)
        if action.kind == "F"
    }
    if not forwards:
        raise InputError(
            f"{source}: holds no forward action; write one line a rank with steps such as 0F0,0B0."
        )
    for rank, steps in enumerate(ranks):
        if not steps or rank >= _MAX_RANKS:
            why = "has no steps" if not steps else f"is past the limit of {_MAX_RANKS:,} ranks"
            raise InputError(
                f"{source}: rank {rank} {why}; every line is one rank that runs at least one stage."
            )
    n_stages = 1 + max(stage for stage, _ in forwards)
    microbatches = 1 + max(microbatch for _, microbatch in forwards)
    # Checked before anything of that size is allocated, because a small file may hold large, sparse numbers.
    if len(forwards) != n_stages * microbatches:
        # At most len(forwards) pairs are present, so the search ends after one more than that.
        pairs = product(range(n_stages), range(microbatches))
        stage, microbatch = next(pair for pair in pairs if pair not in forwards)
        raise InputError(
            f"{source}: forward {stage}F{microbatch} is missing, but stage {n_stages - 1} and micro-batch "
            f"{microbatches - 1} occur; number stages and micro-batches from 0 without gaps."
        )
    forth, back = (tuple(forwards[stage, m] for stage in range(n_stages)) for m in (0, microbatches - 1))
    mirrored = microbatches % 2 == 0 and (forth, back) == bidirectional_routes(n_stages)
    # Any other mixture of ranks fails below, when the validator checks each action against the single route.
    routes = (forth, back) if mirrored and n_stages > 1 else (forth,)
    schedule = Schedule(name, microbatches, routes, ranks, awaits_sends=len(routes) == 2)
    validate(schedule)
    return schedule
