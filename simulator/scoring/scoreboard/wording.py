"""Interprets the words of published tables on sharding, recompute and schedule; refuses unknown words."""

from __future__ import annotations

import re
from typing import NamedTuple

from moesim.hwmodels.errors import InputError
from moesim.simulator.model.recompute import MODULES, Recompute, parse_recompute
from moesim.simulator.schedules import SCHEDULES, name_from
from moesim.simulator.scoring.scoreboard.rows import OpenRow

KEPT_AFTER_FORWARD = re.compile(r"no reshard|without reshard|not reshard|reshard\w*[ =:]+false", re.I)
REPLICATED = re.compile(r"shard=(\d+) x dp (\d+)")
EXPRESSED = ("layernorm", "rmsnorm", "norm", "mla_up_proj", "mla up-proj", "moe_act")
"""Modules that the policy `selective` recomputes: norms, MLA up-projections, product of gate and up."""
OVERLAPPED = re.compile(
    r"(?<!no )(?<!not )(?<!without )(?:\boverlap\w* with (?:the )?(?:a2a|all-to-all)|"
    r"\b(?:a2a|ep|all-to-all)[ -]overlap|a2a_overlap=1)",
    re.I,
)
"""Matches notes that say that expert-parallel all-to-all is hidden behind compute."""


class Sharding(NamedTuple):
    """ZeRO stage of a plan, whether a table names FSDP of PyTorch or JAX, and GPUs of a sharding group."""

    zero_stage: int
    fsdp: bool
    group: int | None = None


def sharding_of(row: OpenRow) -> Sharding:
    """Sharding of a row. Megatron's distributed optimizer is ZeRO 1; FSDP is 3, or 2 without resharding.

    Raises InputError for unknown words.
    """
    text = row.zero_or_fsdp.lower()
    if text in ("", "none", "ddp"):
        return Sharding(0, False)
    fsdp = "fsdp" in text
    if "zero2" in text or "zero-2" in text or KEPT_AFTER_FORWARD.search(text):
        return Sharding(2, fsdp)
    if fsdp or "zero3" in text or "zero-3" in text:
        found = REPLICATED.search(text)
        if found and int(found.group(2)) > 1:
            return Sharding(3, fsdp, group=int(found.group(1)))
        return Sharding(3, fsdp)
    if "zero1" in text or "zero-1" in text or "distopt" in text:
        return Sharding(1, False)
    raise InputError(f"{row.id}: the sharding {row.zero_or_fsdp!r} is not known")


def recompute_of(row: OpenRow) -> tuple[Recompute | None, tuple[str, ...]]:
    """(recompute that a table states, notes on what it does not express); None if it states none.

    Megatron-Core's names of modules are taken as a list; other words stand for the nearest policy.
    Raises InputError for unknown words.
    """
    text = row.recompute.lower().strip()
    if text == "":
        return None, ()
    if text in ("none", "no", "off"):
        return "none", ()
    if text in ("op", "selective (op)", "selective op", "sac (op)"):
        return "op", ()
    if text == "full":
        return "full", ()
    named = re.fullmatch(r"selective(?: *\((.*)\))?", text)
    if named is None:
        raise InputError(f"{row.id}: the recompute policy {row.recompute!r} is not known")
    modules = [word.strip() for word in (named.group(1) or "").split(",") if word.strip()]
    if modules and all(word in MODULES for word in modules):
        return parse_recompute(modules), ()
    other = [word for word in modules if word not in EXPRESSED]
    if not other:
        return "selective", ()
    return "selective", (
        f"recompute of {', '.join(other)} is not expressed: priced as the policy selective (norms, MLA "
        "up-projections, products of gate and up)",
    )


def expert_tp_of(row: OpenRow) -> int:
    """Tensor parallelism of the experts as the notes of a row state it; 1 if they do not."""
    if "ETP==TP" in row.notes:
        return row.tp
    return 4 if "ETP=4" in row.notes else 1


def schedule_of(row: OpenRow) -> str:
    """The pipeline schedule of a row. Raises InputError for an unknown one."""
    text = row.schedule.lower()
    spellings = {
        spelling.lower(): spec
        for spec in SCHEDULES.values()
        for spelling in (spec.name, spec.names_elsewhere.get("torch", spec.name))
    }
    if text and text not in spellings:
        raise InputError(f"{row.id}: the schedule {row.schedule!r} is not known")
    # The stages on a rank decide whether 1F1B is interleaved, whatever the table calls it.
    if not text or "megatron-lm" in spellings[text].names_elsewhere:
        return name_from("megatron-lm", free_vpp=row.vpp > 1)
    return spellings[text].name


def says_overlapped(row: OpenRow) -> bool:
    """Whether the notes of a row say that all-to-alls run behind the compute of another micro-batch."""
    return OVERLAPPED.search(row.notes) is not None
