"""Whole runs: phases with made-up step times, then the home case."""

from __future__ import annotations

import datetime
import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import moesim
from moesim.hwmodels.errors import InfeasibleError, InputError
from moesim.hwmodels.failure import load_failure_rate
from moesim.simulator.layout.job import ResolvedJob, resolve
from moesim.simulator.model.precision import PRECISIONS
from moesim.simulator.run.events import simulate_events
from moesim.simulator.run.failures import FailureModel, Stop, Tier
from moesim.simulator.run.report import RunReport
from moesim.simulator.run.simulate_run import (
    StepFigures,
    interruptions,
    phase_scenario,
    phase_works,
    simulate_run,
)
from moesim.simulator.scenario import load_scenario

HOME = "deepseek-v3-2048xh800"
STOPS = (
    "run.failures=llama3-16k-h100",
    "run.restart=megascale",
    "run.checkpoint={interval: 30 min, storage: deepseek-3fs}",
)
V3_PARAMETERS = 682_000_000_000


def linear(job: ResolvedJob) -> StepFigures:
    """One second of fill and 10 ms for each micro-batch of 4,096 tokens a GPU."""
    tokens = job.scenario.batch.sequences * job.scenario.batch.sequence_length
    return StepFigures(1.0 + 0.01 * tokens / (128 * 4096), 1.0, 2.0)


START = 'run.startup={build: "0 s"}'


def report(*overrides: str, factors: list[float] | None = None) -> RunReport:
    scenario = load_scenario(HOME, overrides)
    plan, cluster = scenario.run, scenario.machine
    stops = interruptions(plan, cluster, V3_PARAMETERS, PRECISIONS["fp8"])
    works = phase_works(resolve(scenario), linear)
    given = None if factors is None else np.array(factors)
    return simulate_run(plan, cluster, works, stops, scenario.seed, given)


def test_tokens_alone_give_the_old_run() -> None:
    plain = report()
    seconds = 235_240 * (1.0 + 0.01 * 120)
    assert plain.days.predicted == plain.days.p90 == pytest.approx(seconds / 86400)
    assert plain.gpu_hours.total == plain.gpu_hours.productive == pytest.approx(seconds / 3600 * 2048)
    assert plain.cost_usd is not None
    assert plain.cost_usd.predicted == pytest.approx(2 * plain.gpu_hours.total)
    assert (plain.goodput.predicted, plain.goodput_expected, plain.replicas) == (1.0, 1.0, 1)
    assert plain.checkpoint is None and plain.causes == () and plain.finish is None


def test_a_job_starts_once_and_again_with_another_plan() -> None:
    """2.7 ms a GPU for communicators; the context extensions of DeepSeek-V3 have plans of their own."""
    one = 2048 * 0.0027
    plain = report(START)
    assert plain.gpu_hours.startup == pytest.approx(one * 2048 / 3600)
    assert plain.days.predicted - report().days.predicted == pytest.approx(one / 86400, rel=1e-6)
    assert 1.0 - plain.goodput.predicted == pytest.approx(one / (plain.days.predicted * 86400))
    whole = report("run=deepseek-v3", 'run.startup.build="5 min"')
    assert whole.gpu_hours.startup == pytest.approx(3 * (one + 300.0) * 2048 / 3600)
    assert whole.gpu_hours.total == pytest.approx(sum(row.gpu_hours_with_stops for row in whole.phases))
    stopped = report(*STOPS)  # an interruption's start-up is part of its restart
    assert stopped.gpu_hours.startup == plain.gpu_hours.startup and stopped.gpu_hours.restart > 0.0


def test_a_linear_step_time_makes_a_ramp_exact() -> None:
    """With t = a + b m the ramp costs a for every step and b for every token, whatever the levels."""
    ramped = report("run.ramp={sequences: 3072, tokens: 469.0e9}").phases[0]
    micro = ramped.tokens / (128 * 4096)
    assert ramped.days * 86400 == pytest.approx(ramped.steps * 1.0 + 0.01 * micro)
    assert ramped.steps == 242_940
    assert ramped.interpolation_error == pytest.approx(0.0, abs=1e-12)


def test_phases_take_their_batch_length_and_overrides() -> None:
    scenario = load_scenario(HOME, ["run=deepseek-v3"])
    second = phase_scenario(scenario, scenario.run.phases[1])
    assert (second.batch.sequences, second.batch.sequence_length, second.parallel.cp) == (480, 131072, 32)
    assert second.parallel.pp == 16 and second.run == scenario.run
    whole = report("run=deepseek-v3")
    assert [row.phase for row in whole.phases][1:] == [p.name for p in scenario.run.phases]
    assert [row.steps for row in whole.phases][1:] == [1000, 1000, 0]
    assert whole.phases[3].gpu_hours == pytest.approx(5000.0)
    assert whole.gpu_hours.total == pytest.approx(sum(row.gpu_hours_with_stops for row in whole.phases))
    assert any("not published" in text for text in whole.assumptions)
    assert any("5 kGPU-h as stated" in text for text in whole.assumptions)


def test_stops_are_booked_and_agree_with_the_closed_form() -> None:
    stopped = report(*STOPS, "run.replicas=600")
    hours = stopped.gpu_hours
    stops = (
        hours.startup, hours.checkpoints, hours.lost, hours.detection, hours.restart,
        hours.waiting_for_spares,
    )  # fmt: skip
    assert math.fsum((hours.productive, *stops)) == pytest.approx(hours.total, rel=1e-9)
    assert stopped.goodput.predicted == pytest.approx(stopped.goodput_expected, rel=2e-3)
    by_cause = {row.cause: row for row in stopped.causes}
    assert by_cause["faulty GPU"].interruptions / stopped.interruptions.predicted == pytest.approx(
        148 / 419, rel=0.1
    )
    assert math.fsum(r.lost_gpu_hours for r in stopped.causes) == pytest.approx(hours.lost)
    assert stopped.days.p10 < stopped.days.p50 < stopped.days.p90
    assert stopped.cost_usd is not None
    assert stopped.cost_usd.p90 / stopped.cost_usd.p10 == pytest.approx(stopped.days.p90 / stopped.days.p10)


def test_finish_dates_follow_from_the_start() -> None:
    stopped = report(*STOPS, "run.start=2026-12-01")
    assert stopped.finish is not None
    first = datetime.date(2026, 12, 1) + datetime.timedelta(days=int(stopped.days.p10))
    assert stopped.finish.p10 == first.isoformat()
    assert stopped.finish.p10 <= stopped.finish.p50 <= stopped.finish.p90
    late = report("run.start=9999-12-30").finish
    assert late is not None and late.p90 == "9999-12-31"


def test_same_seed_same_bytes() -> None:
    texts = [report(*STOPS, f"seed={seed}").model_dump_json() for seed in (3, 3, 4)]
    assert texts[0] == texts[1] != texts[2]


def test_an_uncertain_step_time_widens_the_finish() -> None:
    sharp, wide = report(*STOPS), report(*STOPS, factors=[0.9 + 0.002 * i for i in range(100)])
    assert wide.days.p90 - wide.days.p10 > 2.0 * (sharp.days.p90 - sharp.days.p10)
    assert report(factors=[0.9, 1.1]).replicas == 2
    # Means and tables are at the predicted step, whatever the factors.
    assert (wide.phases, wide.gpu_hours, wide.causes) == (sharp.phases, sharp.gpu_hours, sharp.causes)
    assert wide.days.predicted == sharp.days.predicted and wide.cost_parts_usd == sharp.cost_parts_usd
    assert wide.step_factor is not None and wide.step_factor.p90 == pytest.approx(1.08, abs=0.002)
    assert sharp.step_factor is None


def test_the_same_stops_hit_every_step_time() -> None:
    """Common random numbers: factors of 1 are the run without factors, a slower step is slower throughout."""
    sharp, same = report(*STOPS), report(*STOPS, factors=[1.0] * 100)
    assert same.days == sharp.days and same.outlook == sharp.outlook
    slow = report(*STOPS, factors=[1.1] * 100)
    for before, after in zip(sharp.outlook, slow.outlook, strict=True):
        assert 1.05 * before.days < after.days < 1.2 * before.days


def test_the_outlook_is_the_distribution_of_end_and_bill() -> None:
    found = report(*STOPS, "run.start=2026-12-01", factors=[0.9 + 0.002 * i for i in range(100)])
    rows = found.outlook
    assert [row.share for row in rows][:3] == [0.01, 0.05, 0.1] and len(rows) == 21
    assert all(a.days <= b.days for a, b in pairwise(rows))
    by_share = {row.share: row for row in rows}
    assert found.finish is not None and found.cost_usd is not None
    ends = (by_share[0.1].days, by_share[0.9].days)
    assert ends == pytest.approx((found.days.p10, found.days.p90), rel=1e-12)
    assert (by_share[0.1].finish, by_share[0.9].finish) == (found.finish.p10, found.finish.p90)
    assert by_share[0.5].cost_usd == pytest.approx(found.cost_usd.p50)
    assert found.rows() == found.to_dict()["outlook"]
    assert list(found.to_pandas().columns) == ["share", "days", "finish", "cost_usd"]


def test_the_optimal_interval_is_used_and_shown_beside_young_and_daly() -> None:
    optimal = report(*STOPS, "run.checkpoint.interval=optimal").checkpoint
    assert optimal is not None and optimal.optimal_s is not None
    assert optimal.interval_s == optimal.optimal_s
    assert optimal.daly_s == pytest.approx(optimal.optimal_s, rel=1e-4)
    assert optimal.young_s == pytest.approx(optimal.optimal_s, rel=0.02)
    best = report(*STOPS, "run.checkpoint.interval=optimal").goodput_expected
    for factor in (0.5, 2.0):
        other = report(*STOPS, f"run.checkpoint.interval={factor * optimal.optimal_s} s")
        assert other.goodput_expected < best


def test_checkpoint_bytes_stall_and_write_by_hand() -> None:
    synchronous = report(*STOPS).checkpoint
    assert synchronous is not None
    assert synchronous.bytes == V3_PARAMETERS * 8
    assert synchronous.stall_s == synchronous.write_s == pytest.approx(V3_PARAMETERS * 8 / 500e9)
    behind = report(*STOPS, "run.checkpoint.asynchronous=true").checkpoint
    assert behind is not None
    assert behind.stall_s == pytest.approx(V3_PARAMETERS * 8 / 2048 / 63e9)
    assert behind.write_s == synchronous.write_s


def test_zero_rates_change_nothing() -> None:
    sms_reserved = report("run.failures={interruptions: 0 /node-day}")
    assert sms_reserved.days == report().days
    assert sms_reserved.goodput.predicted == 1.0 and sms_reserved.interruptions.predicted == 0.0


def test_huge_rates_are_infeasible_with_the_reason() -> None:
    with pytest.raises(
        InfeasibleError, match=r"never finishes in practice: one interruption every.*checkpoint"
    ):
        report(*STOPS, "run.failures={interruptions: 300 /node-day}")
    with pytest.raises(InfeasibleError, match=r"maintenance of 23 h every 60 min"):
        report(*STOPS, "run.maintenance={every: 1 h, lasts: 23 h}")


TIER = "run.checkpoint={interval: 1 h, storage: deepseek-3fs, tiers: [%s]}"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            "run.failures={interruptions: 1e6 /node-day}",
            r"2.96e\+03 interruptions.*Nearest possible: 338 /node-day",
        ),
        ("run.spares={count: 257, repair: 3 days}", r"spares.count=257 exceeds the job's 256 nodes.*: 256"),
        (TIER % "{where: host, interval: 1 min}", r"tier 'host' has no bandwidth.*25 GB/s"),
        (TIER % "{where: host, interval: 1 min, bandwidth: 0 GB/s}", r"nearest: 1 MB/s"),
        (
            TIER % "{where: tape, interval: 1 min, bandwidth: 1 GB/s}",
            r"where='tape' is not one of peer, host, disk",
        ),
        (
            "run.checkpoint.interval=400 days",
            r"longer than the training of 5.99 days; nearest possible: 5.99",
        ),
        ("run.maintenance={every: 400 days, lasts: 1 h}", r"nearest possible: 5.99 days"),
        ("run.maintenance={every: -1 days, lasts: 1 h}", r"not negative"),
        ("run.slow={rate: .nan, factor: 1.2, detection: 1 h}", r"run.slow: nan is out of range"),
        ("run.slow={rate: 1e6 /node-day, factor: 1.2, detection: 1 h}", r"nearest possible: 338 /node-day"),
        ("run.slow={rate: 1 /node-day, factor: 0.5, detection: 1 h}", r"nearest: 1"),
        (
            "run.fault_tolerance={groups: 7, stall: 30 s}",
            r"does not divide the job's 256 nodes; nearest possible: 8",
        ),
        ("run.fault_tolerance={groups: 8}", r"fault_tolerance.stall is missing"),
        ("run.fault_tolerance={groups: 8, mode: elastic}", r"needs run.spares"),
    ],
)
def test_what_cannot_be_is_refused_with_the_nearest_that_can(change: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        report(*STOPS, change)


def test_every_loss_is_in_the_books_of_the_report() -> None:
    """All mechanisms together: the total is the exactly rounded sum of its parts; no gap in the timeline."""
    whole = report(
        "run.failures=llama3-16k-h100",
        "run.restart=by-parts",
        TIER % "{where: host, interval: 1 min, bandwidth: 25 GB/s}, {where: peer, interval: 5 min, "
        "bandwidth: 10 GB/s, asynchronous: true}",
        "run.spares={count: 3, repair: 2 days, kind: warm, crews: 2}",
        'run.slow={rate: "1 /1000 node-days", factor: 1.3, detection: 1 h}',
        'run.preemption={rate: "5 /1000 node-days", notice: 2 min, away: 1 h}',
        "run.maintenance={every: 2 days, lasts: 1 h}",
        "run.replicas=20",
    )
    hours = whole.gpu_hours.model_dump()
    parts = [value for name, value in hours.items() if name not in ("total", "billed")]
    assert math.fsum(parts) == hours["total"] == pytest.approx(whole.days.predicted * 24 * 2048, rel=1e-12)
    assert min(hours["slow_nodes"], hours["planned"], hours["lost"]) > 0.0
    assert whole.checkpoint is not None and [row.tier for row in whole.checkpoint.tiers] == [
        "host", "peer", "deepseek-3fs",
    ]  # fmt: skip
    assert {"preempted", "slow node swapped", "planned maintenance"} <= {row.cause for row in whole.causes}
    assert whole.restart_parts["image"] == 0.0 < whole.restart_parts["communicators"]  # warm spares
    assert whole.timeline is not None
    rows = [row for row in whole.timeline.rows if row.what != "fault"]
    assert all(a.end_s == pytest.approx(b.begin_s) for a, b in pairwise(rows))


def test_llama3_stops_as_often_as_its_own_table_says() -> None:
    """An identity: 419 interruptions in 54 days on 2,048 nodes, from the table of those 419."""
    rate = load_failure_rate("llama3-16k-h100")
    stop = Stop("any", 1.0 / rate.mean_time_between_s(2048))
    runs = simulate_events([54 * 86400.0], FailureModel((stop,), (Tier(interval_s=600.0),)), 20, 0)
    exposed = math.fsum(sum(run.wall_ns) for run in runs) / 1e9
    stops = sum(sum(run.stops.values()) for run in runs)
    assert stops / exposed * 54 * 86400.0 == pytest.approx(419, rel=0.03)


def test_repairs_that_take_longer_than_the_nodes_last_are_infeasible() -> None:
    with pytest.raises(InfeasibleError, match=r"spare"):
        report(*STOPS, "run.spares={count: 0, repair: 30 days}")


def test_bad_input_names_the_place() -> None:
    with pytest.raises(InputError, match=r"asynchronous write of 5.456 TB to slow takes 30.3 h"):
        report(
            *STOPS,
            "run.checkpoint={interval: 1 h, asynchronous: true, storage: {name: slow, write: 50 MB/s}}",
        )
    with pytest.raises(InputError, match=r"run.phases 'x'.*cp"):
        moesim.simulate(HOME, "run.phases=[{name: x, steps: 3, override: ['parallel.cp=7']}]")
    with pytest.raises(InputError, match=r"run.ramp.*below the full batch"):
        report("run.ramp={sequences: 15360, tokens: 1e9}")
    with pytest.raises(InputError, match=r"runs no batch from 15232"):
        report("run.ramp={sequences: 15232, tokens: 1e9}")


def test_a_ramp_needs_a_schedule_that_can_run_smaller_batches() -> None:
    notes = report("run=deepseek-v3").assumptions
    assert notes[0].startswith("main: schedule dualpipe cannot run batches below 4,096 sequences")


def test_phases_of_a_scenario_with_a_cluster_of_its_own() -> None:
    """Everything that a scenario file states survives the way into a phase."""
    small = str(Path(__file__).parents[2] / "golden" / "scenario-small.yaml")
    plan = (
        "run.ramp={sequences: 32, tokens: 1e9}",
        "run.phases=[{name: long, steps: 10, sequence_length: 8192}]",
        "run.failures=none",
    )
    result = moesim.simulate(small, *plan)
    main, long = result.run.report.phases if result.run.report else ()
    assert main.step_time_s == result.step.time_s
    assert main.interpolation_error < 0.02
    direct = moesim.simulate(small, "batch.sequence_length=8192").step.time_s
    assert long.step_time_s == direct
    assert long.gpu_hours == pytest.approx(10 * direct * 32 / 3600)
    sure = moesim.simulate(small, *plan, uncertainty=True).run.report
    whole = moesim.run(small, *plan)
    assert whole.inputs is not None and whole.inputs.overrides == plan  # those of a step stand in its result
    assert sure == whole.model_copy(update={"inputs": None})
    assert sure is not None and result.run.report is not None
    assert (
        sure.phases
        == result.run.report.phases
        == moesim.run(small, *plan, step_time_s=main.step_time_s).phases
    )
    assert result.run.report.step_factor is None and sure.step_factor is not None
    assert sure.days.p10 < result.run.report.days.predicted == sure.days.predicted < sure.days.p90


def test_the_report_is_attached_where_the_plan_asks_for_it(
    home_case: tuple[object, object, moesim.Result],
) -> None:
    plain = home_case[2]
    assert plain.run.report is None
    result = moesim.simulate(HOME, *STOPS)
    assert result.run.report is not None
    assert result.run.model_copy(update={"report": None}) == plain.run
    assert result.run.report.phases[0].gpu_hours == pytest.approx(plain.run.gpu_hours)
    paths = {entry.path for entry in result.provenance}
    assert {"scenario.run.failures.interruptions", "scenario.run.restart.recovery"} <= paths
