"""Intervals: what a shift of an entry means, the first-order response against the engine, seeded draws."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from math import fsum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import moesim
from moesim.hwmodels.calibration import Law, MeasuredCurve, list_profiles, load_profile
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.provenance import SourcedSeconds, sourced_numbers
from moesim.simulator.cost.cost_table import cost_table
from moesim.simulator.cost.pricing import Pricer
from moesim.simulator.engine.critical import critical_path
from moesim.simulator.engine.program import Program
from moesim.simulator.predict.driver import Prediction, predict
from moesim.simulator.predict.figures import UNCERTAIN, figures
from moesim.simulator.predict.step import prepare, run_step
from moesim.simulator.scenario import Scenario, load_scenario
from moesim.simulator.studies.effects import EntryEffect, drawn_changes, entry_effects, moved
from moesim.simulator.studies.sources import (
    CLOCK,
    JITTER,
    MAX_VIO,
    SESSION,
    Source,
    cluster_sources,
    entry_sources,
    number_sources,
    path_weights,
    ranged,
    response_s,
    session,
    shifted,
    step_evidence,
)
from moesim.simulator.studies.uncertainty import (
    engine_bands,
    engine_steps_s,
    interval,
    samples_of,
    sensitivity,
    uncertainty,
    with_uncertainty,
)
from moesim.simulator.studies.whole_run import step_factors

pytestmark = pytest.mark.usefixtures("effects_once")
PROFILE = load_profile("h800-trace")
Run = Prediction
Effects = tuple[EntryEffect, ...]


@pytest.fixture(scope="module")
def run(small: Scenario) -> Run:
    """Plan, execution and result of the small job."""
    return predict(small)


@pytest.fixture(scope="module")
def effects(run: Run) -> Effects:
    """The sources of its interval, to first order."""
    return entry_effects(*run[:2])


# -- shifting an entry ---------------------------------------------------------------------------------


@pytest.mark.parametrize("id_", [entry.id for entry in PROFILE.entries()])
def test_a_shift_makes_the_times_of_one_entry_longer(id_: str, change: float = 0.25) -> None:
    moved = shifted(PROFILE, id_, change, 132)
    for old, new in zip(PROFILE.entries(), moved.entries(), strict=True):
        assert (old == new) == (old.id != id_), old.id
    old, new = PROFILE.entry(id_), moved.entry(id_)
    if isinstance(old, Law):
        assert isinstance(new, Law)
        before = old.curve.at(20).value if old.form == "table" else 132 / 112
        assert new.curve.at(20).value == pytest.approx(max(1.0, before * (1 + change)))
        if new.points[0][0] == 0.0:
            assert new.curve.at(0).value == 1.0
    elif isinstance(old, MeasuredCurve) and isinstance(new, MeasuredCurve):
        is_time = old.y_unit in ("us", "ns") or old.y_name.startswith("time of")
        factor = 1 + change if is_time else 1 / (1 + change)
        assert new.curve.ys[0] == pytest.approx(old.curve.ys[0] * factor)


def test_what_an_entry_does_not_touch_keeps_its_price(run: Run) -> None:
    """The table of shifted rates is that of a pricer which remembers nothing."""
    prepared = run[0]
    stages, profile = prepared.stages, prepared.profile
    cost_table(prepared.pricer, prepared.schedule, stages)
    used = [source.id for source in entry_sources(profile, [entry.id for entry in profile.entries()])]
    changed = 0
    for id_ in used[::3]:
        other = shifted(profile, id_, 0.25, 132)
        table = cost_table(prepared.pricer.at_rates(profile=other), prepared.schedule, stages)
        fresh = Pricer(prepared.job.with_rates(profile=other))
        assert table == cost_table(fresh, prepared.schedule, stages), id_
        changed += table != cost_table(prepared.pricer, prepared.schedule, stages)
    assert 2 <= changed < len(used[::3])


def test_entries_shifted_one_after_the_other_are_priced_from_the_profile_before_all(run: Run) -> None:
    prepared = run[0]
    used = [
        entry.id
        for entry in prepared.profile.entries()
        if entry.id in prepared.program.costs.evidence.entries
    ]
    moved = prepared.profile
    for id_ in used:
        moved = shifted(moved, id_, 0.1, 132)
    assert moved._shifted_from == (prepared.profile, frozenset(used)) and len(used) > 3
    fresh = moved.model_copy()  # every price depends on the launch gap, so that none is taken over
    fresh._shifted_from = prepared.profile, frozenset((*used, "launch_gap"))
    tables = [
        cost_table(Pricer(prepared.job.with_rates(profile=profile)), prepared.schedule, prepared.stages)
        for profile in (moved, fresh)
    ]
    assert tables[0] == tables[1] != prepared.program.costs


def test_an_unknown_entry_is_told() -> None:
    with pytest.raises(InputError, match="no entry 'nothing'"):
        shifted(PROFILE, "nothing", 0.1, 132)


def test_times_grow_where_rates_fall() -> None:
    from moesim.hwmodels.calibration import GemmTable

    tables = [load_profile("h800-trace"), load_profile("h800-published")]
    for profile in tables:
        for entry in profile.gemm_tables:
            new = shifted(profile, entry.id, 0.25, 132).entry(entry.id)
            assert isinstance(new, GemmTable)
            for a, b in zip(entry.points, new.points, strict=True):
                assert new.flop_per_s(b) == pytest.approx(entry.flop_per_s(a) / 1.25)


# -- distributions -------------------------------------------------------------------------------------


@given(st.floats(-0.5, -0.01), st.floats(0.01, 2.0))
def test_a_triangular_source_stays_in_its_range(low: float, high: float) -> None:
    source = Source("x", "triangular", low, high, "assumed")
    u = np.linspace(0.0, 1.0, 501)
    at = source.quantile(u)
    assert at[0] == pytest.approx(low) and at[-1] == pytest.approx(high)
    assert (np.diff(at) >= 0).all()
    # The area left of the mode is -low / width.
    assert source.quantile(np.array([-low / (high - low)]))[0] == pytest.approx(0.0, abs=1e-6 * (high - low))
    below, above = source.points()
    assert low < below < above < high


def test_a_normal_source_has_its_residual_as_deviation() -> None:
    source = Source("x", "normal", -0.1, 0.1, "measured")
    assert source.points() == pytest.approx((-0.12816, 0.12816), abs=1e-5)
    draws = source.draw(np.random.default_rng(0).standard_normal(100_000), np.zeros(100_000))
    assert draws.std() == pytest.approx(0.1, rel=0.02)
    assert Source("x", "normal", -9.0, 9.0, "").draw(np.array([-5.0]), np.zeros(1))[0] == -0.9


def test_entries_without_uncertainty_are_no_source() -> None:
    ids = [e.id for e in PROFILE.entries() if e.residual.relative > 0]
    assert [s.id for s in entry_sources(PROFILE, [e.id for e in PROFILE.entries()])] == ids


# -- the response --------------------------------------------------------------------------------------


def test_weights_hold_the_whole_step_and_equal_prices_change_nothing(run: Run) -> None:
    execution = run[1][0]
    weights, costs = path_weights(critical_path(execution)), run[0].program.costs
    assert response_s(weights, costs, costs) == 0.0
    total = sum(weights.parts.values()) + weights.send_s + sum(weights.end_s.values()) + weights.rest_s
    assert total == pytest.approx(execution.end_ns / 1e9, rel=1e-12)


def test_the_first_order_is_what_the_engine_says(run: Run, effects: Effects) -> None:
    """The three largest sources, at their own 10 and 90 % points."""
    linear, result = effects, run[2]
    exact = entry_effects(*run[:2], exact=3)
    assert [e.source.id for e in exact] == [e.source.id for e in linear]
    for a, b in zip(linear[:3], exact[:3], strict=True):
        assert b.exact and not a.exact
        for first, engine in zip(a.seconds, b.seconds, strict=True):
            assert first == pytest.approx(engine, rel=0.35, abs=2e-3 * result.step.time_s), a.source.id
    assert any(abs(a.seconds[1]) > 5e-3 * result.step.time_s for a in linear)


# -- bands ---------------------------------------------------------------------------------------------


def test_bands_follow_from_the_step_time(small: Scenario) -> None:
    result = with_uncertainty(small)
    assert result.uncertainty is not None
    bands = result.uncertainty.bands
    assert list(bands) == list(UNCERTAIN)
    step, rate, cost = bands["step_time_s"], bands["tokens_per_s"], bands["cost_usd"]
    assert step.p10 < step.p50 < step.p90
    assert rate.p10 < rate.p50 < rate.p90
    assert rate.p90 * step.p10 == pytest.approx(result.step.tokens, rel=1e-3)
    assert cost.p90 / cost.predicted == pytest.approx(step.p90 / step.predicted, rel=1e-9)
    assert step.predicted == result.step.time_s == figures(result)["step_time_s"]


def test_the_same_seed_gives_the_same_bytes(small: Scenario, run: Run) -> None:
    first, again = with_uncertainty(small), uncertainty(*run)
    assert first.uncertainty is not None
    assert first.uncertainty.model_dump_json() == again.model_dump_json()
    other = uncertainty(*run, seed=1)
    assert other.bands != again.bands and other.sources == again.sources
    assert "uncertainty" not in run[2].model_dump_json()


@pytest.mark.long
def test_scenarios_that_share_a_source_share_its_draws(small: Scenario, run: Run, effects: Effects) -> None:
    """The spread of a difference is far below that of its parts."""
    prepared, executions, result = predict(small.replace(**{"communication.sms": 16}))
    pairs = ((run[2], effects), (result, entry_effects(prepared, executions)))
    draws = [samples_of(*pair)["step_time_s"] for pair in pairs]
    assert (draws[1] - draws[0]).std() < 0.2 * draws[0].std()


def test_only_the_model_error_is_left_without_entries(run: Run) -> None:
    result = run[2]
    draws = samples_of(result, [], left_out=0.1)["step_time_s"]
    assert draws.std() / result.step.time_s == pytest.approx(0.1, rel=0.05)
    assert (samples_of(result, [], left_out=0.0)["step_time_s"] == result.step.time_s).all()


def test_interval_widens_with_its_level(small: Scenario) -> None:
    narrow, wide = interval(small, level=0.5), interval(small, level=0.9)
    assert wide[0] < narrow[0] < narrow[1] == wide[1] < narrow[2] < wide[2]
    days = moesim.interval(small, metric="days", level=0.9)
    assert days[1] / days[0] == pytest.approx(wide[1] / wide[0])


def test_bad_arguments_are_told(small: Scenario, run: Run) -> None:
    with pytest.raises(InputError, match="nearest: 'step_time_s'"):
        interval(small, "step_time")
    with pytest.raises(InputError, match=r"level=1\.5"):
        interval(small, level=1.5)
    free = load_scenario("deepseek-v3-trace-pair")
    if free.machine.price_per_gpu_hour is None:
        with pytest.raises(InputError, match="price_per_gpu_hour"):
            interval(free, "cost_usd")
    with pytest.raises(InputError, match="samples=3"):
        uncertainty(*run, samples=3)


# -- sensitivity ---------------------------------------------------------------------------------------


def test_the_tornado_is_sorted_and_has_every_kind_of_source(small: Scenario) -> None:
    found = sensitivity(small, {"communication.sms": (8, 32)}, seeds=2, exact=1)
    swings = [abs(e.high_s - e.low_s) for e in found.effects]
    assert swings == sorted(swings, reverse=True)
    by_source = {e.source: e for e in found.effects}
    kinds = {"communication.sms", "variation.seed", "model.left_out", "h800-trace.gemm_told"}
    assert kinds <= set(by_source)
    own = by_source["communication.sms"]
    assert (own.low, own.high, own.exact) == ("8", "32", True)
    assert own.low_s == moesim.simulate(small.replace(**{"communication.sms": 8})).step.time_s
    rows = found.rows()
    assert {row["from"] for row in rows} == {"stated", "engine", "critical path"}
    assert rows[0]["change_high"] == pytest.approx(found.effects[0].high_s / found.step.predicted - 1)


def test_a_range_of_the_price_moves_the_cost_alone(run: Run) -> None:
    key = "cluster.price_per_gpu_hour"
    plain = uncertainty(*run, left_out=0.0)
    priced = uncertainty(*run, left_out=0.0, ranges={key: ("$1/h", "$4/h")})
    assert priced.bands["step_time_s"] == plain.bands["step_time_s"]
    wide, narrow = priced.bands["cost_usd"], plain.bands["cost_usd"]
    assert wide.p10 < 0.85 * narrow.p10 and wide.p90 > 1.15 * narrow.p90


def test_an_illegal_end_of_a_range_is_told(small: Scenario) -> None:
    with pytest.raises(InputError, match=r"parallel\.ep"):
        sensitivity(small, {"parallel.ep": (16, 24)})


# -- numbers with a range, sessions, other architectures -----------------------------------------------


def test_an_entry_carried_to_another_architecture_has_the_error_that_it_states_for_that() -> None:
    profile = load_profile("a100-layers")
    ids = ["p2p.scale_up_fraction", "a100-layers.gemm_bf16"]
    at_home = {s.id: s.high for s in entry_sources(profile, ids, "Hopper")}
    elsewhere = {s.id: s.high for s in entry_sources(profile, ids, "Ampere")}
    assert at_home["p2p.scale_up_fraction"] == 0.03 and elsewhere["p2p.scale_up_fraction"] == 0.09
    assert at_home["a100-layers.gemm_bf16"] == elsewhere["a100-layers.gemm_bf16"]


def test_shapes_that_were_not_measured_widen_their_entry() -> None:
    entry = load_profile("a100-layers").gemm_tables[0]
    (source,) = entry_sources(load_profile("a100-layers"), [entry.id], "Ampere", {entry.id: 0.2})
    assert source.high == 0.2 and "beyond the measured" in source.meaning


def test_numbers_with_a_range_are_sources() -> None:
    found = {s.id: s for s in number_sources(PROFILE)}
    gap = PROFILE.launch_gap
    assert gap is not None and gap.between is not None and set(found) == {
        "launch_gap", "kernel_floor", "lost_beside_nccl",
    }  # fmt: skip
    assert found["launch_gap"].high == pytest.approx(2.4 / 1.93 - 1.0)
    moved = shifted(PROFILE, "launch_gap", 0.1, 132)
    assert moved.launch_gap is not None and moved.launch_gap.value == pytest.approx(1.1 * gap.value)
    lost = found["lost_beside_nccl"]
    assert (lost.low, lost.high) == pytest.approx((0.151 / 0.213 - 1.0, 0.295 / 0.213 - 1.0))
    bare = PROFILE.model_copy(update={"launch_gap": None, "kernel_floor": None})
    assert [source.id for source in number_sources(bare)] == ["lost_beside_nccl"]


def test_a_range_has_the_units_of_its_value_and_survives_a_file() -> None:
    fields = {
        "value": "1.93 us",
        "between": ["1.8 us", "2.4 us"],
        "kind": "measured",
        "source": "test",
        "date": 2025,
    }
    number = SourcedSeconds.model_validate(fields)
    assert number.between == pytest.approx((1.8e-6, 2.4e-6))
    assert SourcedSeconds.model_validate_json(number.model_dump_json()) == number
    with pytest.raises(ValueError, match="bare number"):
        SourcedSeconds.model_validate({**fields, "between": [1, 2]}, context={"place": "file.yaml"})


def test_a_range_that_nothing_uses_is_refused(small: Scenario) -> None:
    jitter = {"value": 0.02, "between": [0.01, 0.03], "kind": "assumed", "source": "test", "date": "2026"}
    zipf = {"kind": "zipf", "exponent": jitter}
    with pytest.raises(InputError, match=r"routing.load.exponent: between=\[0.01, 0.03\] is not used"):
        prepare(small.replace(**{"routing.load": zipf}))
    with pytest.raises(InputError, match="low and a high value"):
        small.replace(**{CLOCK: {**jitter, "between": [0.03, 0.01]}})
    # An override of the value alone leaves the range of what stood there behind: no source.
    for value in (0.0, 0.05):
        number = small.replace(**{CLOCK: {**jitter, "value": value}}).variation.clock_cv
        assert number.between is not None and ranged(CLOCK, number) is None


def test_shipped_ranges_hold_their_values() -> None:
    numbers = [n for name in list_profiles() for _, n in sourced_numbers(load_profile(name))]
    numbers += [n for _, n in sourced_numbers(load_scenario("deepseek-v3-2048xh800"))]
    stated = [n for n in numbers if n.between is not None]
    assert stated and all(n.range == n.between for n in stated)


def test_a_session_moves_all_products_and_attention_together(effects: Effects) -> None:
    by_id = {e.source.id: e for e in effects}
    common = by_id[SESSION]
    bound = session(PROFILE, tuple(by_id))[1]
    assert bound and all("gemm" in id_ or "attention" in id_ for id_ in bound)
    single = sum(by_id[id_].seconds[1] / by_id[id_].at[1] for id_ in bound)
    assert common.seconds[1] == pytest.approx(single * common.at[1], rel=1e-9)


def spread(value: float, low: float, high: float) -> dict[str, object]:
    return {"value": value, "between": [low, high], "kind": "assumed", "source": "test", "date": "2026"}


LOAD = {"kind": "maxvio", "max_vio": spread(0.52, 0.04, 0.72)}


@pytest.mark.parametrize(
    ("key", "changes", "value", "end"),
    [
        (CLOCK, {CLOCK: spread(0.012, 0.006, 0.018), JITTER: 0.0}, 0.012, 1),
        (JITTER, {JITTER: spread(0.02, 0.01, 0.04)}, 0.02, 1),
        ("routing.expert_load_cv", {"routing.expert_load_cv": spread(0.16, 0.08, 0.32)}, 0.16, 1),
        (MAX_VIO, {"routing.load": LOAD}, 0.52, 0),
    ],
)
def test_spreads_with_a_range_to_first_order(
    small: Scenario, effects: Effects, key: str, changes: dict[str, Any], value: float, end: int
) -> None:
    """Against the engine with another spread, the same seeds; without a range there is no source."""
    assert key == CLOCK or key not in {e.source.id for e in effects}
    ranged_ = small.replace(**changes)
    prepared, executions, result = predict(ranged_)
    effect = next(e for e in entry_effects(prepared, executions) if e.source.id == key)
    assert effect.seconds[0] < 0.0 < effect.seconds[1]
    other = value * (1.0 + effect.at[end])
    exact = run_step(ranged_.replace(**{key: other})).time_s - result.step.time_s
    assert effect.seconds[end] == pytest.approx(exact, rel=0.35)
    if key == MAX_VIO:
        shifted_ = moved(prepared, {MAX_VIO: effect.at[0]}, ())
        assert shifted_.scenario.routing.load.now == pytest.approx(other)  # type: ignore[union-attr]


# -- full resolution, the whole run --------------------------------------------------------------------


def test_full_resolution_has_an_interval_along_its_own_path() -> None:
    """Two groups of 16 GPUs a pipeline rank; the largest source against the engine."""
    full = load_scenario(
        "deepseek-v3-2048xh800",
        [
            "cluster={node: hgx-h800, nodes: 16, network: mpft-ib-400g, name: 128xh800}",
            "parallel={tp: 1, pp: 4, ep: 16, cp: 1, microbatch: 1, zero_stage: 1}",
            "stages.blocks=[embedding moe, moe, moe, moe head]",
            "batch.sequences=256",
            "resolution=full",
        ],
    )
    prepared, executions, result = predict(full)
    found, (exact, *_) = (
        uncertainty(prepared, executions, result),
        entry_effects(prepared, executions, exact=1),
    )
    first = next(row for row in found.sources if row.source == exact.source.id)
    ends = (first.low_s - result.step.time_s, first.high_s - result.step.time_s)
    assert exact.exact and ends == pytest.approx(exact.seconds, rel=0.05)
    assert found.bands["step_time_s"].p10 < result.step.time_s < found.bands["step_time_s"].p90
    assert "group 0, the last of 2" in found.note


def test_replicas_have_the_distribution_of_the_step(run: Run) -> None:
    prepared, executions, _ = run
    many, few = (step_factors(prepared, executions, n) for n in (4096, 200))
    assert len(few) == 200 and few.std() == pytest.approx(many.std(), rel=0.02)
    assert np.quantile(few, [0.1, 0.9]) == pytest.approx(np.quantile(many, [0.1, 0.9]), rel=5e-3)
    assert (few[:-1] > few[1:]).mean() == pytest.approx(0.5, abs=0.15)  # in no order


def test_numbers_of_the_cluster_with_a_range_are_sources(small: Scenario) -> None:
    """A NIC that may be slower makes the step longer at that end, to first order and in the engine."""
    machine = small.machine
    nic = machine.node.nic_bandwidth
    assert nic is not None and nic.range is None
    ranged_nic = nic.model_copy(update={"between": (0.5 * nic.value, nic.value)})
    node = machine.node.model_copy(update={"nic_bandwidth": ranged_nic})
    scenario = small.model_copy(update={"cluster": machine.model_copy(update={"node": node})})
    name = "cluster.node.nic_bandwidth"
    assert cluster_sources(machine) == ()
    (source,) = cluster_sources(scenario.machine)
    assert (source.id, source.high) == (name, 0.0)
    assert source.low == pytest.approx(-0.5)
    prepared, executions, _ = predict(scenario)
    (effect,) = [e for e in entry_effects(prepared, executions) if e.source.id == name]
    assert effect.seconds[0] > effect.seconds[1] >= 0.0
    again = run_step(moved(prepared, {name: effect.at[0]}, ()), stages=prepared.stages)
    longer = again.time_s - executions[0].end_ns / 1e9
    assert longer > 0.5 * effect.seconds[0]


# -- residuals of an interval are weighed by what a step runs, not by how the code came to its prices ----


def compute_s(program: Program) -> float:
    """Seconds of all compute of a program at even load, and of its optimizers."""
    phases = [
        task.price.fixed_s + task.price.row_s - task.price.exposed_s - task.price.host_s
        for steps in program.ranks
        for step in steps
        for task in step.code.tasks
    ]
    return fsum(phases) + fsum(sync.optimizer_s for sync in program.costs.sync)


def test_the_readings_of_a_step_are_all_of_its_compute(small: Scenario) -> None:
    program = prepare(small).program
    readings = step_evidence(program).readings
    assert fsum(reading.seconds for reading in readings) == pytest.approx(compute_s(program), rel=1e-12)


def test_twice_the_micro_batches_read_twice_the_seconds(small: Scenario) -> None:
    """In a schedule without pairs: in one with them more micro-batches also mean a larger share of pairs."""
    small = small.replace(schedule="1f1b")
    twice = small.replace(**{"batch.sequences": 2 * small.batch.sequences})
    one, two = (
        {reading.entry: reading.seconds for reading in step_evidence(prepare(scenario).program).readings}
        for scenario in (small, twice)
    )
    grown = {entry: two[entry] / one[entry] for entry in one}
    assert max(grown.values()) == pytest.approx(2.0) and list(one) == list(two)
    assert sorted(grown.values())[3] > 1.9  # all but the optimizer's entries: norm, AdamW, and a prior


def test_layers_written_out_have_the_interval_of_automatic_ones() -> None:
    """Automatic placement prices every block once more than written-out layers do; the step is the same."""
    automatic = load_scenario(str(Path(__file__).parents[2] / "golden" / "scenario-small.yaml"))
    layers = prepare(automatic).stages.layers_per_stage
    written = automatic.replace(**{"stages.layers": list(layers)})
    one, two = (with_uncertainty(scenario) for scenario in (automatic, written))
    assert one.uncertainty is not None and two.uncertainty is not None
    assert one.step.time_s == two.step.time_s
    assert one.uncertainty.bands == two.uncertainty.bands
    assert one.uncertainty.sources == two.uncertainty.sources


# -- intervals by the engine itself (docs/model.md, eq. u7) ----------------------------------------


def test_engine_draws_are_the_runs_themselves(small: Scenario) -> None:
    """A draw is one engine run with all sources off together, in this process or in workers (eq. U7)."""
    prepared, executions, result = predict(small)
    effects = entry_effects(prepared, executions)
    with ThreadPoolExecutor(1) as pool:
        here = engine_steps_s(prepared, effects, 8, seed=3, pool=pool)
    changes = {e.source.id: float(drawn_changes(e.source, 8, 3)[7]) for e in effects}
    used = tuple(prepared.program.costs.evidence.entries)
    assert here[7] == run_step(moved(prepared, changes, used), stages=prepared.stages).time_s
    bands = engine_bands(prepared, result, effects, 8, left_out=0.0, seed=3)
    step = bands.bands["step_time_s"]
    assert [step.p10, step.p50, step.p90] == pytest.approx(
        list(np.quantile(here, [0.1, 0.5, 0.9])), rel=1e-12
    )
    first_order = result.step.time_s + sum(e.draw_s(8, 3) for e in effects)
    assert bands.first_order_rms == pytest.approx(np.sqrt(((first_order / here - 1.0) ** 2).mean()))


@pytest.mark.parametrize("draws", [-1, 19, 10_001])
def test_engine_draws_out_of_range_are_refused(small: Scenario, draws: int) -> None:
    for call in (
        lambda: moesim.simulate(small, uncertainty=True, engine_draws=draws),
        lambda: moesim.sensitivity(small, engine_draws=draws),
        lambda: moesim.interval(small, engine_draws=draws),
    ):
        with pytest.raises(InputError, match=f"engine draws={draws}: give 20 to 10,000"):
            call()


# -- shifted profiles: an error is cut at the datasheet peak ---------------------------------------


JOB = {
    "model": "llama-3-8b", "cluster": {"accelerator": "h100-sxm", "nodes": 1}, "parallel": {"zero_stage": 1},
    "batch": {"sequences": 8, "sequence_length": 4096}, "precision": "bf16",
}  # fmt: skip


def test_an_error_that_reaches_above_the_peak_is_cut_there() -> None:
    from moesim.hwmodels.validation import validate_model

    job = validate_model(Scenario, JOB, "job")
    profile = load_profile("h100-layers")
    table = next(t for t in profile.gemm_tables if t.dtype == "bf16")
    fast = shifted(profile, table.id, -0.6, 132)
    assert fast._shifted_from == (profile, frozenset({table.id})) and profile._shifted_from is None
    quick = moesim.simulate(job.model_copy(update={"profile": fast}))
    assert quick.step.mfu_causal < 1.0
    with pytest.raises(InputError, match="correct the entry"):
        moesim.simulate(job.model_copy(update={"profile": fast.model_validate(fast.model_dump())}))


def test_prices_kept_from_before_a_shift_are_those_of_pricing_everything_again(small: Scenario) -> None:
    """Phases that do not depend on the shifted entry keep their prices; a copy of the profile keeps none."""
    prepared = prepare(small)
    own = prepared.profile
    before = cost_table(prepared.pricer, prepared.schedule, prepared.stages)
    changed = 0
    for entry in (*sorted(before.evidence.entries)[::3], "launch_gap", "kernel_floor"):
        tables = [
            cost_table(
                pricer.at_rates(profile=shifted(profile, entry, 0.1, 132)), prepared.schedule, prepared.stages
            )
            for pricer, profile in ((prepared.pricer, own), (prepared.pricer, own.model_copy()))
        ]
        assert tables[0] == tables[1]
        changed += tables[0].compute != before.compute
    assert changed >= 3
