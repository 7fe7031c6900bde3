"""The registry of schedules: what every spec says of its schedule is what its builder builds."""

from __future__ import annotations

import pytest

from moesim.simulator.schedules import (
    SCHEDULES,
    Durations,
    ScheduleSpec,
    fleet_defaults,
    name_from,
    pool_defaults,
    published_bubble,
    register,
)
from moesim.simulator.schedules.interleaved import build_1f1b


@pytest.mark.parametrize("spec", SCHEDULES.values(), ids=list(SCHEDULES))
def test_what_a_spec_says_is_what_it_builds(spec: ScheduleSpec) -> None:
    vpp = spec.stages_per_rank or 3
    for pp, microbatches in ((2, 4), (4, 8), (4, 16)):
        built = spec.build(pp, microbatches, vpp)
        assert built.name == spec.name
        assert built.vpp == vpp
        assert (len(built.routes) == 2) == spec.bidirectional
        assert built.paired == spec.overlapped_pairs
        assert built.awaits_sends == spec.awaits_sends


@pytest.mark.parametrize("spec", SCHEDULES.values(), ids=list(SCHEDULES))
def test_steps_of_micro_batches_are_legal_and_add_the_same_actions(spec: ScheduleSpec) -> None:
    assert spec.microbatch_step is not None
    pp, count, vpp = 4, 24, spec.stages_per_rank or 2
    step = spec.microbatch_step(pp, count)
    sizes = [len(spec.build(pp, count + n * step, vpp).ranks[1]) for n in range(3)]
    assert sizes[1] - sizes[0] == sizes[2] - sizes[1]


def test_lists_follow_from_the_specs() -> None:
    assert fleet_defaults() == ("1f1b", "zb-h1", "zbv", "dualpipev")
    assert pool_defaults() == (*fleet_defaults(), "dualpipe")
    assert name_from("megatron-lm", free_vpp=False) == "1f1b"
    assert name_from("megatron-lm", free_vpp=True) == "interleaved-1f1b"
    assert [name for name, spec in SCHEDULES.items() if "torch" not in spec.names_elsewhere] == [
        "interleaved-1f1b-overlapped",
        "zb-h1",
        "dualpipe",
    ]


def test_a_name_is_taken_once() -> None:
    with pytest.raises(ValueError, match="'1f1b' is registered already"):
        register(ScheduleSpec("1f1b", build_1f1b))
    assert published_bubble("a file", 4, Durations()) is None
