"""The clock of a block follows the power of its own mix (eq. C33), and prices follow the clock."""

from __future__ import annotations

from math import fsum

import pytest
from lab import packed

from moesim.hwmodels.calibration import load_profile
from moesim.hwmodels.calibration_entry import LoadClass, PowerLaw, load_clock
from moesim.hwmodels.errors import InputError
from moesim.simulator.cost.cost_table import block_compute, inside_step
from moesim.simulator.cost.pricing import Pricer
from moesim.simulator.layout.job import resolve
from moesim.simulator.predict.driver import simulate
from moesim.simulator.scenario import load_scenario

RESULT = "2026-11-22-h200-power.json"
OVERRIDES = ["profile=h200-products", "precision=bf16"]


@pytest.fixture(scope="module")
def law() -> PowerLaw:
    found = load_profile("h200-products").power
    assert found is not None
    return found


def test_gemms_back_to_back_run_at_the_reference_and_waits_raise_the_clock(law: PowerLaw) -> None:
    def gemms(clock: float) -> dict[LoadClass, float]:
        return {"gemm": 1.0}

    assert load_clock(law, gemms) == pytest.approx(1.0, abs=1e-3)
    clocks = [load_clock(law, gemms, wait=wait) for wait in (0.05, 0.2, 0.4, 2.0)]
    assert clocks == sorted(clocks) and clocks[0] > 1.02 and clocks[-1] == law.most_clock
    # A wait for collectives draws more than an idle GPU, so it leaves less.
    assert load_clock(law, gemms, collective=0.2) < clocks[1]


def test_attention_alone_runs_at_its_own_clock_and_memory_is_not_limited(law: PowerLaw) -> None:
    alone = load_clock(law, lambda clock: {"attention": 1.0})
    assert alone == pytest.approx(law.classes["attention"].alone_clock, rel=0.01)
    assert load_clock(law, lambda clock: {"memory": 1.0}) == law.most_clock


@pytest.mark.parametrize("name", ["soak", "mix with a fifth idle", "gemm and attention"])
def test_clocks_of_mixes_that_had_no_part_in_the_law(law: PowerLaw, name: str) -> None:
    data = packed.read(RESULT)["segments"]
    segment, reference = data[name], data["gemm large"]["sm_mhz"]
    seconds: dict[LoadClass, float] = {}
    for cls, row in segment["classes"].items():
        key: LoadClass = cls.split("_")[0]
        seconds[key] = seconds.get(key, 0.0) + row["seconds"]
    wait = fsum(seconds.values()) * (1.0 / segment["busy_share"] - 1.0)
    clock = load_clock(law, lambda clock: seconds, wait=wait)
    assert clock * reference == pytest.approx(segment["sm_mhz"], rel=0.02)


def test_an_h100s_memory_leaves_more_power_than_an_h200s(law: PowerLaw) -> None:
    own = load_profile("h100-from-h200").power
    assert own is not None and own.id == "h100-power.law" and law.id == "h200-power.law"
    assert load_profile("h100-layers").power == own
    data = packed.read("2026-11-26-h100-power.json")["segments"]
    for name, share in (("soak", 0.025), ("mix with a fifth idle", 0.025), ("gemm and rows", 0.025)):
        segment, seconds = data[name], dict[LoadClass, float]()
        for cls, row in segment["classes"].items():
            key: LoadClass = "memory" if cls == "pieces" else cls.split("_")[0]
            seconds[key] = seconds.get(key, 0.0) + row["seconds"]
        wait = fsum(seconds.values()) * (1.0 / segment["busy_share"] - 1.0)

        def busy(clock: float, seconds: dict[LoadClass, float] = seconds) -> dict[LoadClass, float]:
            return seconds

        clock = load_clock(own, busy, wait=wait)
        assert clock * 1357 == pytest.approx(segment["sm_mhz"], rel=share)

    def halves(clock: float) -> dict[LoadClass, float]:
        return {"gemm": 0.5, "memory": 0.5}

    assert load_clock(own, halves) * 1357 > load_clock(law, halves) * 1460  # MHz beside as much memory work


def table(*more: str) -> tuple[Pricer, float, float]:
    """The pricer of a small plan, and its seconds of GEMM-bound and of memory-bound phases of a layer."""
    scenario = load_scenario("llama-3-70b-64xh100", [*OVERRIDES, "cluster.accelerator=h200-sxm", *more])
    pricer = Pricer(resolve(scenario))
    compute = block_compute(pricer, "dense", ("alone",))
    inside, _ = inside_step(pricer, "dense", compute, {}, ("alone",))
    after = {**compute, **inside}
    total = fsum(cost.fixed_s for key, cost in after.items() if key[0] == "dense")
    waits = fsum(cost.exposed_s for key, cost in after.items() if key[0] == "dense")
    return pricer, total, waits


def test_a_layer_that_waits_runs_its_gemms_faster() -> None:
    _, load_s, waits = table("software.overlap_tensor_parallel=none")
    _, full_s, same = table("software.overlap_tensor_parallel=none", "variation.power_clock=full-load")
    assert waits == same > 0.0
    assert 0.85 * full_s < load_s < 0.99 * full_s
    # Without the waits less is gained.
    hidden = table("software.overlap_tensor_parallel=full")[1]
    hidden_full = table("software.overlap_tensor_parallel=full", "variation.power_clock=full-load")[1]
    assert load_s / full_s < hidden / hidden_full < 1.01


def test_rates_measured_in_place_keep_their_clock() -> None:
    assert load_profile("h800-trace").power is None


def test_collectives_beside_compute_take_power_from_it(law: PowerLaw) -> None:
    def gemms(clock: float) -> dict[LoadClass, float]:
        return {"gemm": 1.0}

    assert load_clock(law, gemms, beside=1.0) < load_clock(law, gemms, beside=0.3) < load_clock(law, gemms)


# -- caps and energy ---------------------------------------------------------------------------------

CAP = "cluster.node.accelerator.power_limit"
SMALL = ["cluster.nodes=8", "batch.sequences=64", "parallel={tp: 1, pp: 2, ep: 32, zero_stage: 1}",
         "schedule=1f1b", "stages={}", "recompute=full"]  # fmt: skip


def test_a_cap_costs_time_and_saves_energy_and_the_uses_of_power_add_up() -> None:
    results = [
        simulate(load_scenario("deepseek-v3-2048xh100", [*SMALL, *([f"{CAP}={cap} W"] if cap else [])]))
        for cap in (None, 700, 500, 350)
    ]
    times = [result.step.time_s for result in results]
    energies = [result.energy for result in results]
    assert times[0] == times[1] < times[2] < times[3]
    for result, energy in zip(results, energies, strict=True):
        assert energy is not None
        assert fsum(use.seconds for use in energy.by_use) == pytest.approx(result.step.time_s)
        mean_w = fsum(use.seconds * use.board_w for use in energy.by_use) / result.step.time_s
        assert (
            energy.board_w == pytest.approx(min(mean_w, energy.limit_w)) and energy.board_w <= energy.limit_w
        )
        joules = energy.board_w * result.step.time_s * 64
        assert energy.joules_per_token == pytest.approx(joules / (64 * 4096))
    watts = [energy.board_w for energy in energies if energy]
    assert watts[1] > watts[2] > watts[3]


@pytest.mark.parametrize(
    ("preset", "cap", "words"),
    [
        ("deepseek-v3-2048xh100", "200 W", "outside 280 W to 700 W.*nearest: 280 W"),
        ("deepseek-v3-2048xh100", "900 W", "nearest: 700 W"),
        ("deepseek-v3-2048xh800", "500 W", "no law of power against clock"),
    ],
)
def test_caps_without_a_price_are_refused(preset: str, cap: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        simulate(load_scenario(preset, [f"{CAP}={cap}"]))


def test_power_without_an_own_law_is_assumed() -> None:
    energy = simulate(load_scenario("deepseek-v3-1024xmi300x")).energy
    assert energy is not None and energy.assumed
    assert energy.board_w == energy.limit_w and [use.use for use in energy.by_use] == ["taken at its limit"]
