"""Groups of operators that communication SMs slow down alike, and the names they had before.

A GEMM kernel is aware of the SMs when it takes a number of SMs to run on and so leaves the rest alone.
Earlier releases wrote `told` and `gemm_told`, `gemm_untold`; profiles that hold these are read unchanged.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import AliasChoices, BeforeValidator

LawGroup = Literal["gemm_sm_aware", "gemm_sm_unaware", "attention", "memory_bound", "communication"]

FORMER_GROUPS: Final[dict[str, LawGroup]] = {"gemm_told": "gemm_sm_aware", "gemm_untold": "gemm_sm_unaware"}
_FORMER_WORDS = {'"sm_aware":': '"told":', **{f'"{now}"': f'"{then}"' for then, now in FORMER_GROUPS.items()}}

SM_AWARE = AliasChoices("sm_aware", "told")
"""The key of a table that says whether its kernels are aware of the SMs, as files write it."""


def _current(value: object) -> object:
    return FORMER_GROUPS.get(value, value) if isinstance(value, str) else value


AnyLawGroup = Annotated[LawGroup, BeforeValidator(_current)]
"""A group as a file writes it, under its name or the former one."""


def entry_id_suffix(group: LawGroup) -> str:
    """The last part of an entry's id: the former name, which profiles that are compared hold already."""
    return next((then for then, now in FORMER_GROUPS.items() if now == group), group)


def with_former_names(text: str) -> str:
    """The JSON text of a profile under the former names, over which it has always been hashed.

    A quotation mark inside a text is escaped in JSON, so that only keys and whole values are found.
    """
    for now, then in _FORMER_WORDS.items():
        text = text.replace(now, then)
    return text
