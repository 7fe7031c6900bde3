"""Legality before any simulation: the check itself, and legal values as data beside every refusal."""

from __future__ import annotations

import pytest

import moesim
from moesim.hwmodels.errors import InputError

HOME = "deepseek-v3-2048xh800"


def test_a_legal_plan_says_what_it_comes_to() -> None:
    found = moesim.check(HOME)
    assert (found.n_gpus, found.dp, found.microbatches, len(found.stages) > 0) == (2048, 128, 120, True)
    assert found.memory == moesim.simulate(HOME).memory


@pytest.mark.parametrize(
    ("overrides", "key", "nearest"),
    [
        (("parallel.ep=48",), "parallel.ep", (32, 64)),
        (("parallel.pp=24",), "parallel.pp", (16, 32)),
        (("parallel.pp=1", "batch.sequences=16384"), "parallel.pp", (2,)),
        (("batch.sequences=15361",), "batch.sequences", (15360, 15488)),
        (("batch.sequences=2048",), "batch.sequences", (4096,)),
        (("batch.sequences=4224",), "batch.sequences", (4096, 4352)),
        (("communication.sms=132",), "communication.sms", (24,)),
        (("parallel.zero_stage=3",), "parallel.zero_stage", (2,)),
        (("parallel.tp=2", "parallel.sequence_parallel=false"), "parallel.sequence_parallel", (True,)),
        (("parallel.sequence_parallel=true",), "parallel.sequence_parallel", (False,)),
        (("parallel.vpp=2",), "parallel.vpp", (1,)),
        (("parallel.cp=3",), "parallel.cp", (2, 4)),
    ],
)
def test_every_nearest_value_is_named_in_the_message_and_moves_on(
    overrides: tuple[str, ...], key: str, nearest: tuple[object, ...]
) -> None:
    with pytest.raises(InputError) as caught:
        moesim.check(HOME, *overrides)
    assert (caught.value.key, caught.value.nearest) == (key, nearest)
    for value in nearest:
        text = str(value).lower() if isinstance(value, bool) else str(value)
        try:
            moesim.check(HOME, *overrides, f"{key}={text}")
        except InputError as error:  # the next problem, not the same one
            assert str(error) != str(caught.value)


def test_a_profile_of_another_accelerator_offers_those_that_fit() -> None:
    """The rules choose the profile of another accelerator, unless it is named together with the cluster."""
    with pytest.raises(InputError) as caught:
        moesim.check(HOME, "cluster=h100-1024", "profile=h800-trace")
    assert caught.value.key == "profile"
    assert caught.value.nearest[-1] == "generic-roofline"
    moesim.check(
        HOME,
        "cluster=h100-1024",
        f"profile={caught.value.nearest[0]}",
        "batch.sequences=7680",
        "parallel.ep=64",
    )


def test_other_errors_carry_no_values() -> None:
    error = InputError("no")
    assert (error.key, error.nearest) == (None, ())
