"""Every argument of Megatron-LM has exactly one entry in the table."""

from __future__ import annotations

from pathlib import Path

import pytest

from moesim.hwmodels.errors import InputError
from moesim.simulator.trainers.meaning.table import megatron_table

NAMES = Path(__file__).with_name("megatron-argument-names.txt")


def listed() -> dict[str, str]:
    """Names without dashes, with the numbers of the versions that have them."""
    lines = [line for line in NAMES.read_text().splitlines() if not line.startswith("#")]
    return {
        name.removeprefix("--"): versions for name, _, versions in (line.partition(" ") for line in lines)
    }


def test_the_table_has_every_argument_of_both_versions_and_no_other() -> None:
    names = listed()
    assert len(names) == 903 and {"1", "2", "1 2"} == set(names.values())
    assert set(megatron_table().entries) == set(names)


def test_every_entry_says_what_it_means() -> None:
    for entry in megatron_table().entries.values():
        assert entry.status == "used" or entry.reason[:1].isupper(), entry
        if entry.status == "not priced":
            assert entry.direction


def test_an_abbreviation_counts_where_it_is_unique() -> None:
    table = megatron_table()
    assert table.entry("--untie", "x").name == "untie-embeddings-and-output-weights"
    assert table.entry("--num-layers", "x").name == "num-layers"  # the whole name wins over longer ones
    with pytest.raises(InputError, match=r"run\.sh, line 3: '--num-lay' is short for several"):
        table.entry("--num-lay", "run.sh, line 3")


def test_an_unknown_argument_is_refused_with_the_nearest() -> None:
    with pytest.raises(
        InputError, match=r"'--tensor-model-paralel-size'.*nearest: 'tensor-model-parallel-size'"
    ):
        megatron_table().entry("--tensor-model-paralel-size", "run.sh, line 1")
