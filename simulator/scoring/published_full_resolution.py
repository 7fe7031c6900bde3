"""Checks full resolution against the folded run, two measured networks and a published timeline."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from moesim.hwmodels.cluster import load_cluster
from moesim.hwmodels.frozen import Frozen
from moesim.simulator.cost.collectives.library import load_library
from moesim.simulator.cost.collectives.registry import collective
from moesim.simulator.engine.full_resolution.result import SkewRow
from moesim.simulator.predict.driver import simulate
from moesim.simulator.predict.step import run_step
from moesim.simulator.scenario import load_scenario
from moesim.simulator.scoring import published_data

EVEN = ("routing.expert_load_cv=0", "variation.clock_cv=0", "variation.jitter_cv=0")
"""Overrides that make all ranks equal."""


class _Networks(Frozen):
    """Published figures of one job on two networks."""

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


class Difference(Struct, frozen=True):
    """A published relative difference (0 if there must be none) and the predicted one.

    `limit` is the largest absolute deviation between the two.
    """

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


class NotifyRow(Struct, frozen=True):
    """Wait at one barrier of a pair, of one GPU in a published timeline and of all GPUs in a full run."""

    phase: str
    layer: int
    published_s: float
    predicted: SkewRow


class FullChecks(Struct, frozen=True):
    """Results of all checks of full resolution."""

    differences: tuple[Difference, ...]
    notify: tuple[NotifyRow, ...]
    notify_source: str


def check_full(progress: Callable[[str], None] = lambda what: None) -> FullChecks:
    """Check full resolution of the home case against the folded run and measurements (takes about 30 s)."""
    data = published_data(_Networks, "networks.yaml")
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
    """The difference of an all-to-all on both networks, which was published as at most a few percent."""
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
