"""Curves through a scenario: one input varied over sensible values, all others as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from msgspec import Struct, field

from moesim.hwmodels.errors import InfeasibleError, InputError
from moesim.hwmodels.provenance import Sourced
from moesim.hwmodels.units import quantity_text
from moesim.simulator.predict.driver import simulate
from moesim.simulator.predict.figures import figures
from moesim.simulator.scenario import Scenario
from moesim.simulator.studies.store import Status

# -- faster links ------------------------------------------------------------------------------------
# Overrides of a scenario that make the links of its cluster faster or slower.


def faster_links(scenario: Scenario, nic: float = 1.0, scale_up: float = 1.0) -> tuple[str, ...]:
    """Overrides that multiply the bandwidths of NICs and of links inside a node.

    `nic` also scales the switch ports of the NICs. Latencies, the kernels' shares of a bandwidth and figures
    of achievable bandwidth, which no price reads, stay as they are. The new figures count as assumed; figures
    that the hardware does not have are left out.
    """
    node, fabric = scenario.machine.node, scenario.machine.network.fabric
    accelerator = node.accelerator
    section = node.scale_up.fabric if node.scale_up is not None else None
    figures: list[tuple[str, Sourced | None, float]] = [
        ("cluster.node.nic_bandwidth", node.nic_bandwidth, nic),
        ("cluster.network.fabric.link_bandwidth", getattr(fabric, "link_bandwidth", None), nic),
        ("cluster.node.accelerator.scale_up_bandwidth", accelerator.scale_up_bandwidth, scale_up),
        ("cluster.node.scale_up.fabric.link_bandwidth", getattr(section, "link_bandwidth", None), scale_up),
    ]
    return tuple(
        f"{key}={quantity_text(figure.value * factor, 'bytes_per_s')}"
        for key, figure, factor in figures
        if figure is not None and factor != 1.0
    )


AxisName = Literal["sms", "nic", "scale_up", "ep", "batch", "imbalance", "nodes", "sequence"]

MOST_VALUES = 9
"""Most values of one axis; those nearest to the scenario's own are taken."""
FACTORS = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0)
"""Factors of a bandwidth."""
SMS = (2, 4, 8, 12, 16, 20, 24, 28, 32, 40)
LOAD_CVS = (0.0, 0.04, 0.08, 0.16, 0.24, 0.32, 0.48, 0.64)
BATCH_SHARES = (0.125, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0)
SHOWN = ("step_time_s", "tokens_per_s_per_gpu", "mfu_causal", "days", "cost_usd", "memory_bytes")
"""Figures of a point."""


class CurveAxis(Struct, frozen=True):
    """One input with the values to try, in ascending order; `own` is the place of the scenario's value."""

    name: AxisName
    label: str
    values: tuple[float, ...]
    words: tuple[str, ...]
    """Every value as a short text with its unit."""
    own: int

    def nearest_first(self) -> tuple[int, ...]:
        """Places of the values, the scenario's own first and the farthest last."""
        return tuple(sorted(range(len(self.values)), key=lambda n: (abs(n - self.own), n)))


class CurvePoint(Struct, frozen=True):
    """The prediction at one value. `reason` says why the plan is illegal, or how much memory it lacks."""

    value: float
    status: Status
    reason: str = ""
    figures: dict[str, float | None] = field(default_factory=dict)


def axes(scenario: Scenario) -> tuple[CurveAxis, ...]:
    """The inputs that can be varied and their values; those that the hardware or model lacks are left out.

    Raises InputError for a fleet and for names that cannot be read.
    """
    return tuple(axis for make in _MAKERS for axis in make(scenario) if len(axis.values) > 1)


def overrides_at(scenario: Scenario, name: AxisName, value: float) -> tuple[str, ...]:
    """Overrides that set one input of the scenario; none where it already has the value.

    `nic` and `scale_up` are factors of today's bandwidths, as in `faster_links`; all other values are those
    of the scenario's key.
    """
    if name == "nic":
        return faster_links(scenario, nic=value)
    if name == "scale_up":
        return faster_links(scenario, scale_up=value)
    key, now = {
        "sms": ("communication.sms", scenario.communication.sms),
        "ep": ("parallel.ep", scenario.parallel.ep),
        "batch": ("batch.sequences", scenario.batch.sequences),
        "imbalance": ("routing.expert_load_cv", float(scenario.routing.expert_load_cv.value)),
        "nodes": ("cluster.nodes", scenario.machine.nodes),
        "sequence": ("batch.sequence_length", scenario.batch.sequence_length),
    }[name]
    return () if value == now else (f"{key}={value:g}" if value != int(value) else f"{key}={int(value)}",)


def curve_point(
    scenario: Scenario,
    name: AxisName,
    value: float,
    admit: Callable[[Scenario], Scenario] = lambda changed: changed,
) -> CurvePoint:
    """Predict the scenario with one input changed; an illegal value gives a point with the reason.

    `admit` may refuse a scenario, by InputError, before it is simulated.
    """
    try:
        changed = admit(scenario.overridden(*overrides_at(scenario, name, value)))
        result = simulate(changed)
    except InfeasibleError as error:
        return CurvePoint(value, "infeasible", str(error))
    except InputError as error:
        return CurvePoint(value, "illegal", str(error))
    all_figures = figures(result)
    kept = {key: found if isinstance(found := all_figures[key], float) else None for key in SHOWN}
    shortage = result.memory.shortage
    return CurvePoint(value, "ok" if shortage is None else "does not fit", shortage or "", kept)


def _axis(
    name: AxisName,
    label: str,
    values: Iterable[float],
    own: float,
    words: Callable[[float], str] = lambda value: f"{value:,g}",
) -> CurveAxis:
    """An axis of the values nearest to the scenario's own, which is always among them."""
    found: Sequence[float] = sorted({*values, own})
    place = found.index(own)
    first = max(0, min(place - MOST_VALUES // 2, len(found) - MOST_VALUES))
    kept = tuple(found[first : first + MOST_VALUES])
    return CurveAxis(name, label, kept, tuple(map(words, kept)), kept.index(own))


def _sms(scenario: Scenario) -> list[CurveAxis]:
    accelerator = scenario.machine.accelerator
    if accelerator.compute_units is None or accelerator.communication_engine is not None:
        return []
    most = accelerator.compute_units.n - 1
    own = scenario.communication.sms
    label = f"Communication {accelerator.unit_name}s"
    return [_axis("sms", label, [sms for sms in SMS if sms <= most], own)]


def _links(scenario: Scenario) -> list[CurveAxis]:
    node = scenario.machine.node
    found = []
    if scenario.machine.nodes > 1 and node.nic_bandwidth is not None:
        value = node.nic_bandwidth.value * (node.n_nics_per_gpu or 1)
        found.append(_axis("nic", "NIC bandwidth a GPU", FACTORS, 1.0, lambda f: _rate(f * value)))
    scale_up = node.accelerator.scale_up_bandwidth
    if node.n_gpus > 1 and scale_up is not None:
        found.append(
            _axis("scale_up", "Scale-up bandwidth a GPU", FACTORS, 1.0, lambda f: _rate(f * scale_up.value))
        )
    return found


def _rate(bytes_per_s: float) -> str:
    return quantity_text(float(f"{bytes_per_s:.3g}"), "bytes_per_s")


def _experts(scenario: Scenario) -> list[CurveAxis]:
    moe = scenario.shape.moe
    if moe is None:
        return []
    plan = scenario.parallel
    most = scenario.machine.n_gpus // plan.pp
    divisors = [ep for ep in range(1, min(moe.experts, most) + 1) if moe.experts % ep == 0]
    found = [_axis("ep", "Expert parallelism (EP)", divisors, plan.ep)]
    own = float(scenario.routing.expert_load_cv.value)
    found.append(_axis("imbalance", "Spread of expert load (CV)", LOAD_CVS, own, lambda cv: f"{cv:.2g}"))
    return found


def _batch(scenario: Scenario) -> list[CurveAxis]:
    plan, batch = scenario.parallel, scenario.batch
    replicas = max(1, scenario.machine.n_gpus // (plan.tp * plan.pp * plan.cp)) * plan.microbatch
    wanted = [
        max(1, round(share * batch.sequences / replicas)) * replicas for share in BATCH_SHARES if share != 1.0
    ]
    length = batch.sequence_length
    lengths = [length >> k for k in (1, 2) if length % (1 << k) == 0] + [length << k for k in (1, 2, 3)]
    return [
        _axis("batch", "Batch (sequences)", wanted, batch.sequences),
        _axis("sequence", "Sequence length (tokens)", lengths, length),
    ]


def _nodes(scenario: Scenario) -> list[CurveAxis]:
    nodes, per_node = scenario.machine.nodes, scenario.machine.node.n_gpus
    wanted = [nodes >> k for k in (1, 2, 3) if nodes % (1 << k) == 0] + [nodes << k for k in (1, 2, 3)]
    return [_axis("nodes", "GPUs, same batch", wanted, nodes, lambda n: f"{n * per_node:,g}")]


_MAKERS: tuple[Callable[[Scenario], list[CurveAxis]], ...] = (_sms, _links, _experts, _batch, _nodes)
