"""Groups of operators that communication SMs slow down alike, and their former names.

A GEMM kernel is SM-aware when it accepts a number of SMs to run on and leaves the others free. Earlier
releases wrote `told`, `gemm_told` and `gemm_untold`; profiles with these words are still read.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import AliasChoices, BeforeValidator

LawGroup = Literal["gemm_sm_aware", "gemm_sm_unaware", "attention", "memory_bound", "communication"]

FORMER_GROUPS: Final[dict[str, LawGroup]] = {"gemm_told": "gemm_sm_aware", "gemm_untold": "gemm_sm_unaware"}
_FORMER_WORDS = {'"sm_aware":': '"told":', **{f'"{now}"': f'"{then}"' for then, now in FORMER_GROUPS.items()}}

SM_AWARE = AliasChoices("sm_aware", "told")
"""Key of a table that says whether its kernels are SM-aware, under its name or the former one."""


def _current(value: object) -> object:
    return FORMER_GROUPS.get(value, value) if isinstance(value, str) else value


AnyLawGroup = Annotated[LawGroup, BeforeValidator(_current)]
"""A group in a file, under its name or the former one."""


def entry_id_suffix(group: LawGroup) -> str:
    """Last part of an entry's id; it keeps the former name, so that older profiles can be compared."""
    return next((then for then, now in FORMER_GROUPS.items() if now == group), group)


def with_former_names(text: str) -> str:
    """The JSON text of a profile with the former names, which its hash has always been computed from.

    JSON escapes a quotation mark inside a text, so only keys and whole values are replaced.
    """
    for now, then in _FORMER_WORDS.items():
        text = text.replace(now, then)
    return text
