"""List expressions: every form, every refusal, and that the grammar never evaluates anything."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesim.hwmodels.errors import InputError
from moesim.simulator.common.texts import MOST_VALUES, parse_integers, parse_interval, parse_values


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("7", (7,)),
        ("1..4", (1, 2, 3, 4)),
        ("0..48:16", (0, 16, 32, 48)),
        ("0..48:+16", (0, 16, 32, 48)),
        ("8..256:x2", (8, 16, 32, 64, 128, 256)),
        ("8..100:2x", (8, 16, 32, 64)),
        ("0.1..0.5:0.1", (0.1, 0.2, 0.3, 0.4, 0.5)),
        ("1..8:x1.5", (1, 1.5, 2.25, 3.375, 5.0625, 7.59375)),
        ("-4..4:4", (-4, 0, 4)),
        ("bf16, fp8", ("bf16", "fp8")),
        ("50 GB/s,100 GB/s", ("50 GB/s", "100 GB/s")),
        (
            "{kind: zipf, exponent: 0.3},{kind: uniform}",
            ({"kind": "zipf", "exponent": 0.3}, {"kind": "uniform"}),
        ),
        ("'a,b',c", ("a,b", "c")),
        ("4,2,4,8..9", (4, 2, 8, 9)),
        ("true,1", (True, 1)),
        ("[1, 2]", (1, 2)),
        ("[[1, 2]]", ([1, 2],)),
    ],
)
def test_forms(text: str, values: tuple[object, ...]) -> None:
    found = parse_values(text, "key")
    assert found == values
    assert [type(v) for v in found] == [type(v) for v in values]


@pytest.mark.parametrize(
    "text",
    ["", "1,,2", "8..1", "1..8:x1", "0..8:x2", "1..8:0", "1..8:-1", "1..", "1..2..3", "0.5..2", "{a: 1",
     "'a", "1..99999999", "1..8:x", "*x", "1..8:y2"],
)  # fmt: skip
def test_what_is_refused_names_the_key(text: str) -> None:
    with pytest.raises(InputError, match=r"parallel\.ep"):
        parse_values(text, "parallel.ep")


def test_nothing_is_evaluated() -> None:
    assert parse_values("__import__('os').getcwd()", "key") == ("__import__('os').getcwd()",)
    assert parse_values("2**8", "key") == ("2**8",)


def test_integers_are_sorted_and_whole() -> None:
    assert parse_integers("8,1..3,2", "tp") == (1, 2, 3, 8)
    for text in ("1.5", "fp8", "true", "-1", "0..1:0.5"):
        with pytest.raises(InputError, match="tp"):
            parse_integers(text, "tp")


def test_interval() -> None:
    assert parse_interval("8..256", "k") == (8.0, 256.0)
    assert parse_interval("0.5..2.0", "k") == (0.5, 2.0)
    assert parse_interval("1..8:2", "k") is None
    assert parse_interval("1,2", "k") is None
    with pytest.raises(InputError, match="backwards"):
        parse_interval("3..1", "k")


@given(st.integers(0, 10**6), st.integers(0, 500), st.integers(1, 40))
def test_steps_are_those_of_range(first: int, count: int, step: int) -> None:
    last = first + count
    assert parse_values(f"{first}..{last}:{step}", "k") == tuple(range(first, last + 1, step))


@given(st.integers(1, 10**6), st.integers(0, 10**7), st.integers(2, 9))
def test_multiples_are_powers_times_the_first(first: int, more: int, factor: int) -> None:
    values = parse_values(f"{first}..{first + more}:x{factor}", "k")
    assert values == tuple(first * factor**n for n in range(len(values)))
    assert values[-1] <= first + more < values[-1] * factor


@given(
    st.lists(
        st.one_of(st.integers(-(10**9), 10**9), st.sampled_from(["fp8", "bf16", "1f1b"])),
        min_size=1,
        max_size=30,
    )
)
def test_values_written_out_come_back(values: list[object]) -> None:
    text = ",".join(map(str, values))
    assert parse_values(text, "k") == tuple(dict.fromkeys(values))


@given(st.text(max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        assert 1 <= len(parse_values(text, "k")) <= MOST_VALUES
    except InputError as error:
        assert str(error)
