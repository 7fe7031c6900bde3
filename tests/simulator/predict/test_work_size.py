"""The work of a scenario is estimated before it is done, and what cannot end is refused at once."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from moesim.hwmodels.errors import InputError
from moesim.simulator.predict import work_size as module
from moesim.simulator.predict.step import Prepared, prepare
from moesim.simulator.predict.work_size import WorkLimits, WorkSize, own_machine
from moesim.simulator.scenario import Scenario, load_scenario


def work_size(scenario: Scenario) -> WorkSize:
    """The size of a scenario's work, what it names loaded."""
    return module.work_size(scenario, scenario.shape, scenario.machines)


def check_size(scenario: Scenario, limits: WorkLimits, trace: bool = False) -> WorkSize:
    """The same, refused above the limits."""
    return module.check_size(scenario, scenario.shape, scenario.machines, limits, trace=trace)


HOME = "deepseek-v3-2048xh800"
LIMITS = WorkLimits(1_300_000_000, 20.0, 1_000_000, "the test", "do something else")


def held(prepared: Prepared) -> tuple[int, int]:
    """(tasks, numbers) that a prepared scenario really has."""
    tasks = numbers = 0
    for program in prepared.programs:
        seen = set()
        for rank in program.ranks:
            for step in rank:
                tasks += len(step.code.tasks)
                for task in step.code.tasks:
                    if id(task.rows_ns) not in seen:
                        seen.add(id(task.rows_ns))
                        numbers += task.rows_ns.size
        numbers += program.variation.loads.size + program.variation.node_loads.size
    return tasks, numbers


@pytest.mark.parametrize(
    "overrides",
    [(), ("batch.sequences=256",), ("resolution=full",), ("schedule=1f1b",), ("parallel.ep=8",)],
)
def test_the_estimate_holds_what_is_really_there_and_not_ten_times_as_much(
    small: Scenario, overrides: tuple[str, ...]
) -> None:
    scenario = small.overridden(*overrides)
    size = work_size(scenario)
    tasks, numbers = held(prepare(scenario))
    assert tasks <= size.tasks <= 3 * tasks
    assert numbers <= size.numbers <= 10 * numbers


def test_micro_batches_blocks_and_groups_multiply(small: Scenario) -> None:
    one = work_size(small)
    assert one.blocks == 10 and one.microbatches == 8 and one.gpus == 64
    assert work_size(small.overridden("batch.sequences=1280")).tasks == 10 * one.tasks
    blocks = "stages.blocks=[embedding moe*2, moe*1000000002, moe*2, moe*2 head]"
    assert work_size(small.overridden(blocks)).tasks > 10**8 * one.tasks
    assert work_size(small.overridden("resolution=full")).parts > 64


def test_a_fleet_counts_every_pool(mixed: Scenario) -> None:
    size = work_size(mixed)
    assert size.gpus == 32 and size.tasks > 0


@pytest.mark.parametrize(
    ("override", "key", "words"),
    [
        ("batch.sequences=16000000", "batch.sequences", "125,000 micro-batches"),
        ("stages.blocks=[embedding moe*1000000000, head]", None, "1,000,000,002 blocks"),
    ],
)
def test_too_much_is_refused_with_value_limit_and_remedy(override: str, key: str | None, words: str) -> None:
    with pytest.raises(InputError) as caught:
        check_size(load_scenario(HOME, [override]), LIMITS)
    text = str(caught.value)
    assert words in text and "1.3 GB" in text and "the test" in text and "do something else" in text
    assert caught.value.key == key
    if key:
        (near,) = caught.value.nearest
        assert isinstance(near, int)
        check_size(load_scenario(HOME, [f"{key}={near}"]), LIMITS)


def test_a_trace_needs_more_than_its_simulation() -> None:
    scenario = load_scenario(HOME, ["batch.sequences=76800"])
    check_size(scenario, LIMITS)
    with pytest.raises(InputError, match="GB"):
        check_size(scenario, LIMITS, trace=True)


def test_every_gpu_for_itself_has_a_limit_of_parts() -> None:
    whole = ["cluster.network=ft3-ib-400g", "cluster.nodes=2048", "batch.sequences=128", "resolution=full"]
    with pytest.raises(InputError, match=r"cluster.nodes"):
        check_size(load_scenario(HOME, whole), replace(LIMITS, most_bytes=10**15, most_parts=10_000))


def test_the_command_line_refuses_what_this_machine_cannot_end() -> None:
    with pytest.raises(InputError, match="this machine"):
        prepare(load_scenario(HOME, ["batch.sequences=5120000000"]))
    assert own_machine().most_bytes > 10**8


def test_memory_grows_with_every_count() -> None:
    size = WorkSize(gpus=1, blocks=1, microbatches=1, tasks=10, numbers=10, parts=10)
    for name in ("tasks", "numbers", "parts"):
        assert replace(size, **{name: 1000}).bytes > size.bytes
    assert size.trace_bytes > size.bytes and replace(size, simulations=3).seconds == 3 * size.seconds
