"""Lists the shipped hardware, and every number of one description, as rows for people."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from pydantic import BaseModel

from moesim.hwmodels.accelerator import Accelerator, list_accelerators, load_accelerator
from moesim.hwmodels.cluster import list_clusters, load_cluster
from moesim.hwmodels.confidence import best_profile, compute_units_text, missing_figures
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.failure import (
    list_failure_rates,
    list_restarts,
    list_storage,
    load_failure_rate,
    load_restart,
    load_storage,
)
from moesim.hwmodels.host import list_hosts, load_host
from moesim.hwmodels.network import list_networks, list_scale_ups, load_network, load_scale_up
from moesim.hwmodels.node import list_nodes, load_node
from moesim.hwmodels.price import (
    list_energy_sites,
    list_prices,
    list_purchases,
    load_energy_site,
    load_prices,
    load_purchase,
)
from moesim.hwmodels.provenance import sourced_numbers
from moesim.hwmodels.units import format_quantity
from moesim.hwmodels.validation import nearest


class HardwareRow(NamedTuple):
    """The kind (`what`), name and summary of one shipped description.

    An accelerator also has the best `confidence` that a shipped profile gives it, with that profile's name,
    and the figures that nobody published (`moesim.hwmodels.confidence`).
    """

    what: str
    name: str
    summary: str
    confidence: str = ""
    missing: str = ""


class FigureRow(NamedTuple):
    """One number of a description, formatted, with its provenance."""

    path: str
    value: str
    kind: str
    source: str
    date: str
    note: str


_KINDS: dict[str, tuple[Callable[[], tuple[str, ...]], Callable[[str], BaseModel]]] = {
    "accelerator": (list_accelerators, load_accelerator),
    "node": (list_nodes, load_node),
    "scale-up": (list_scale_ups, load_scale_up),
    "network": (list_networks, load_network),
    "cluster": (list_clusters, load_cluster),
    "energy": (list_energy_sites, load_energy_site),
    "failures": (list_failure_rates, load_failure_rate),
    "restart": (list_restarts, load_restart),
    "storage": (list_storage, load_storage),
    "host": (list_hosts, load_host),
    "purchase": (list_purchases, load_purchase),
}


def hardware_rows() -> list[HardwareRow]:
    """One row for every shipped description and price list, by kind."""
    rows = []
    for what, (names, load) in _KINDS.items():
        for name in names():
            model = load(name)
            if isinstance(model, Accelerator):
                level, profile = best_profile(model)
                missing = [*missing_figures(model), *([] if name in list_prices() else ["price"])]
                summary = f"{_summary(model)}, {compute_units_text(model)}"
                rows.append(HardwareRow(what, name, summary, f"{level} ({profile})", ", ".join(missing)))
            else:
                rows.append(HardwareRow(what, name, _summary(model)))
    for name in list_prices():
        values = [offer.value for offer in load_prices(name).offers]
        low, high = (format_quantity(value, "usd_per_hour") for value in (min(values), max(values)))
        offers = f"{len(values)} dated offers, {low} to {high}" if len(values) > 1 else f"one figure, {low}"
        rows.append(HardwareRow("prices", name, offers))
    return rows


def describe(name: str) -> list[FigureRow]:
    """Every sourced number of the shipped description called `name`, in file order.

    An accelerator's rental offers and missing figures are appended, the latter of kind `missing`. Raises
    InputError, which suggests the nearest name, for an unknown one.
    """
    for names, load in _KINDS.values():
        if name in names():
            model = load(name)
            rows = _figures(model)
            if isinstance(model, Accelerator):
                if (engine := model.communication_engine) is not None:
                    provenance = (engine.kind, engine.source, engine.date, engine.note or "")
                    rows.append(FigureRow("communication_engine", engine.name, *provenance))
                why = ("not found", "missing", "no public source was found", "", "")
                rows += [FigureRow(figure, *why) for figure in missing_figures(model)]
            return rows + (_figures(load_prices(name)) if name in list_prices() else [])
    known = [known for names, _ in _KINDS.values() for known in names()]
    raise InputError(
        f"unknown hardware {name!r}{nearest(name, known)}; the known names are {', '.join(known)}"
    )


def _figures(model: BaseModel) -> list[FigureRow]:
    rows = []
    for path, number in sourced_numbers(model):
        note = "; ".join(text for text in (getattr(number, "terms", ""), number.note) if text)
        rows.append(FigureRow(path, number.text, number.kind, number.source, number.date, note))
    return rows


def _summary(model: BaseModel) -> str:
    title: str = getattr(model, "title", "")
    return title
