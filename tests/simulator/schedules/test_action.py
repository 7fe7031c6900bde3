from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesim.hwmodels.errors import InputError
from moesim.simulator.schedules import Action, Overlap, Step, actions_of, parse_step

numbers = st.integers(0, 999_999)
actions = st.builds(Action, numbers, st.sampled_from(["F", "I", "W", "B"]), numbers)
forwards = st.builds(Action, numbers, st.just("F"), numbers)
backwards = st.builds(Action, numbers, st.sampled_from(["B", "I"]), numbers)
steps: st.SearchStrategy[Step] = st.one_of(actions, st.builds(Overlap, forwards, backwards))


def test_text_form_is_the_notation_of_pytorch() -> None:
    pair = Overlap(Action(0, "F", 7), Action(7, "B", 3))
    assert str(Action(3, "F", 12)) == "3F12"
    assert str(pair) == "(0F7;7B3)OVERLAP_F_B"
    assert actions_of(pair) == (Action(0, "F", 7), Action(7, "B", 3))


@given(steps)
def test_parse_reverses_str(step: Step) -> None:
    assert parse_step(str(step)) == step
    assert parse_step(f"  {step}\t") == step


@pytest.mark.parametrize(
    "text",
    [
        "", "F", "3F", "F3", "3X1", "-1F0", "3F1 2", "3f1", "٣F1", "3.0F1", "1234567F0", "9" * 5000 + "F0",
        "(0F7;7B3)", "(0F7)OVERLAP_F_B", "(0F7;7B3;1F1)OVERLAP_F_B", "((0F7;7B3)OVERLAP_F_B;1B1)OVERLAP_F_B",
        "(7B3;0F7)OVERLAP_F_B", "(0F7;7W3)OVERLAP_F_B", "(0F7;7B3)OVERLAP_F_B ;", "\x00\x01", "nan",
    ],
)  # fmt: skip
def test_anything_else_is_refused_with_the_format(text: str) -> None:
    with pytest.raises(InputError, match=r"^line 2, cell 3: .*3F12.*OVERLAP_F_B") as error:
        parse_step(text, "line 2, cell 3")
    assert len(str(error.value)) < 500
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["3SEND_F1", "1UNSHARD", "0REDUCE_GRAD", "2RECV_B0"])
def test_communication_actions_name_the_export_that_works(text: str) -> None:
    with pytest.raises(InputError, match="compute_only"):
        parse_step(text)
