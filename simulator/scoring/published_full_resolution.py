"""What full resolution is checked against: the folded run, two networks that were measured, a timeline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources

from pydantic import BaseModel, ConfigDict

from moesim.hwmodels.cluster import load_cluster
from moesim.hwmodels.validation import validate_model
from moesim.hwmodels.yaml_io import parse_mapping
from moesim.simulator.cost.collectives.library import load_library
from moesim.simulator.cost.collectives.price import collective
from moesim.simulator.engine.full_resolution.result import SkewRow
from moesim.simulator.predict.simulate import simulate
from moesim.simulator.predict.step import run_step
from moesim.simulator.scenario import load_scenario

EVEN = ("routing.expert_load_cv=0", "variation.clock_cv=0", "variation.jitter_cv=0")


class _Networks(BaseModel):
    """Published figures of one job on two networks."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    scenario: str
    clusters: tuple[str, str]
    step_s: tuple[float, float]
    step_source: str
    all_to_all_gpus: tuple[int, ...]
    all_to_all_bytes: float
    all_to_all_most: float
    all_to_all_source: str
    notify_source: str
    notify_us: dict[str, tuple[float, ...]]


@dataclass(frozen=True, slots=True)
class Difference:
    """A relative difference that was published or must be nothing, beside ours; `limit` in absolute terms."""

    id: str
    quantity: str
    source: str
    published: float
    predicted: float
    limit: float

    @property
    def holds(self) -> bool:
        """Whether the two differ by no more than the limit."""
        return abs(self.predicted - self.published) <= self.limit


@dataclass(frozen=True, slots=True)
class NotifyRow:
    """Wait at one barrier of a pair: one GPU of a published timeline beside all GPUs of a full run."""

    phase: str
    layer: int
    published_s: float
    predicted: SkewRow


@dataclass(frozen=True, slots=True)
class FullChecks:
    """Everything that full resolution is checked against."""

    differences: tuple[Difference, ...]
    notify: tuple[NotifyRow, ...]
    notify_source: str


def check_full(progress: Callable[[str], None] = lambda what: None) -> FullChecks:
    """Full resolution of the home case beside the folded run and what was measured (about half a minute)."""
    text = (
        resources.files("moesim.simulator").joinpath("data", "published", "networks.yaml").read_text("utf-8")
    )
    data = validate_model(_Networks, parse_mapping(text, "networks.yaml"), "networks.yaml")
    progress("full resolution with equal ranks")
    even = load_scenario(data.scenario, EVEN)
    folded = run_step(even).time_s
    full = run_step(even.model_copy(update={"resolution": "full"})).time_s
    results = []
    for cluster in data.clusters:
        progress(f"full resolution on {cluster}")
        results.append(simulate(load_scenario(data.scenario, ["resolution=full", f"cluster={cluster}"])))
    first, second = (result.step.time_s for result in results)
    differences = [
        Difference(
            "folded_and_full",
            "step at full resolution over the folded one, equal ranks",
            "must be nothing",
            0.0,
            full / folded - 1.0,
            0.001,
        ),
        Difference(
            "networks.step",
            f"step on {data.clusters[1]} over {data.clusters[0]}",
            data.step_source,
            data.step_s[1] / data.step_s[0] - 1.0,
            second / first - 1.0,
            0.005,
        ),
        *(_all_to_all(data, gpus) for gpus in data.all_to_all_gpus),
    ]
    shown = results[0].full
    assert shown is not None
    notify = tuple(
        NotifyRow(row.phase, row.layer, data.notify_us[row.phase][row.layer] * 1e-6, row)
        for row in shown.skew
        if row.layer < len(data.notify_us.get(row.phase, ()))
    )
    return FullChecks(tuple(differences), notify, data.notify_source)


def _all_to_all(data: _Networks, gpus: int) -> Difference:
    """An all-to-all on both networks: the published difference was within a few percent of nothing."""
    seconds = [
        collective(
            "all_to_all", data.all_to_all_bytes, range(gpus), load_cluster(name).topology(), load_library()
        ).seconds
        for name in data.clusters
    ]
    return Difference(
        f"networks.all_to_all.{gpus}",
        f"all-to-all over {gpus} GPUs on {data.clusters[1]} over {data.clusters[0]}",
        data.all_to_all_source,
        0.0,
        seconds[1] / seconds[0] - 1.0,
        data.all_to_all_most,
    )
