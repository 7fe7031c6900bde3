from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesim.hwmodels.errors import InputError
from moesim.simulator.schedules import Overlap, build, from_csv, from_json, to_csv, to_json


def test_json_has_the_agreed_shape() -> None:
    document = json.loads(to_json(build("dualpipe", 2, 4)))
    assert list(document) == ["name", "pp", "microbatches", "ranks"]
    assert (document["name"], document["pp"], document["microbatches"]) == ("dualpipe", 2, 4)
    assert document["ranks"][0][:2] == ["0F0", "1F2"]


def test_csv_reads_what_pytorch_writes() -> None:
    # Idle slots are empty cells, lines end in CR LF.
    schedule = from_csv("0F0,0F1,,,0B0,,0B1\r\n,1F0,1B0,1F1,1B1\r\n\r\n", name="mine")
    assert (schedule.name, schedule.pp, schedule.microbatches, schedule.placement) == ("mine", 2, 2, "loop")
    assert to_csv(schedule) == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
    assert from_csv('\ufeff"0F0","0B0"\n').pp == 1


def test_csv_infers_sizes_and_placement() -> None:
    pairs = from_csv(to_csv(build("dualpipev", 4, 10)))
    assert (pairs.placement, pairs.n_stages, pairs.microbatches, pairs.vpp) == ("v", 8, 10, 2)
    assert any(isinstance(step, Overlap) for step in pairs.ranks[0])
    assert from_csv(to_csv(build("dualpipe", 4, 10))).placement == "bidirectional"
    assert from_csv(to_csv(build("interleaved-1f1b", 4, 8, 3))).vpp == 3
    # A placement of the user's own: stages 0 and 1 on rank 0, stage 2 on rank 1.
    own = from_csv("0F0,1F0,1B0,0B0\n2F0,2B0\n")
    assert (own.placement, own.routes, own.vpp) == ("custom", ((0, 0, 1),), 2)
    assert own.stages_on_rank(0) == (0, 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no forward"),
        ("\n\n,,\n", "holds no forward"),
        ("0W0,0I0\n", "holds no forward"),
        ("0F0,0B0\n\n1F0,1B0\n", "rank 1 has no steps"),
        ("0F0,hello\n", r"line 1, cell 2: cannot read 'hello' as a schedule step.*3F12"),
        ("0F0,0B0\n1F0,1SEND_B0\n", r"line 2, cell 2: .*compute_only"),
        ("\x00\x01\x02\xff\n", "line 1, cell 1: cannot read"),
        ('0F0,"0B0\n', "not a CSV text"),
        ("0F0,999999F999999\n", r"forward 0F1 is missing"),
        ("0F0,0F2,0B0,0B2\n", r"forward 0F1 is missing, but .* micro-batch 2 occur"),
        ("0F0 0B0\n", "cannot read '0F0 0B0'"),
        ("stage,microbatch\n0,0\n", "cannot read 'stage'"),
        ("x" * 200_000, "not a CSV text"),
    ],
)
def test_bad_csv_names_the_place(text: str, message: str) -> None:
    with pytest.raises(InputError, match=rf"^file\.csv: .*{message}|^schedule csv: {message}"):
        from_csv(text, source="file.csv")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "top level"),
        ("[]", "top level"),
        ("{" * 5000, "top level"),
        ("\ud800", "not valid Unicode|top level"),
        ('{"name":"a","pp":1,"microbatches":1}', "ranks: Field required"),
        ('{"name":"a","pp":1,"microbatches":1,"ranks":[["0F0","0B0"]],"extra":1}', "extra: Extra inputs"),
        (
            '{"name":"a","pp":"1","microbatches":1,"ranks":[["0F0","0B0"]]}',
            "pp: Input should be a valid integer",
        ),
        ('{"name":"a","pp":2,"microbatches":1,"ranks":[["0F0","0B0"]]}', "pp=2, but .* have 1"),
        ('{"name":"a","pp":1,"microbatches":3,"ranks":[["0F0","0B0"]]}', "microbatches=3, but"),
        ('{"name":"a","pp":1,"microbatches":1,"ranks":[["0F0","0Q0"]]}', r"ranks\.0\.1: cannot read '0Q0'"),
        ('{"name":"a","pp":1,"microbatches":1,"ranks":[["0F0",""]]}', r"ranks\.0\.1: cannot read ''"),
    ],
)
def test_bad_json_names_the_place(text: str, message: str) -> None:
    with pytest.raises(InputError, match=rf"^file\.json: .*({message})|^file\.json: {message}"):
        from_json(text, source="file.json")


cells = st.one_of(
    st.from_regex(r"[0-2][FIWB][0-2]", fullmatch=True),
    st.sampled_from(["", "(0F1;0B0)OVERLAP_F_B", "(1F1;1I0)OVERLAP_F_B", "0F", "\x00", '"']),
)


@settings(max_examples=150, deadline=None)
@given(st.one_of(st.text(max_size=60), st.lists(st.lists(cells, max_size=8), max_size=3)))
def test_any_csv_is_a_valid_schedule_or_an_input_error(content: str | list[list[str]]) -> None:
    text = content if isinstance(content, str) else "\n".join(",".join(row) for row in content)
    try:
        schedule = from_csv(text)
    except InputError as error:
        assert "\n" not in str(error)
        return
    assert from_csv(to_csv(schedule)) == schedule
