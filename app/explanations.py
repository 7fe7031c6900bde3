"""How each headline figure of a result comes about: formula, inputs with today's values, sources.

A formula is arithmetic over the symbols of its inputs in SI units, so that it can be evaluated, and carries
the label of its equation in docs/model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import groupby
from math import isclose
from urllib.parse import urlencode

import streamlit as st
from msgspec import Struct

from moesim.app import forms, state
from moesim.app import scenario_links as changes
from moesim.app.texts import compact, escaped, plain, written
from moesim.hwmodels.units import format_quantity
from moesim.simulator.common.texts import overridden_key
from moesim.simulator.model.counts import flop_per_token
from moesim.simulator.predict.result import Result
from moesim.simulator.predict.result_parts import ProvenanceEntry
from moesim.simulator.run.bill import rates
from moesim.simulator.run.report import RunReport
from moesim.simulator.scenario import Scenario

SIMULATED = "simulated by this version (docs/model, chapter 7)"
"""Source of the seconds of a step; the numbers behind them are all rows of Evidence."""


class FormulaInput(Struct, frozen=True):
    """One symbol of a formula: its meaning, value in SI units, the value as text, and where it comes from.

    `find`: the row of the page Evidence that has its source.
    """

    symbol: str
    meaning: str
    value: float
    text: str
    source: str
    find: str


class Derivation(Struct, frozen=True):
    """A figure, its formula over the symbols of its inputs, and the labels of its equations in docs/model."""

    figure: str
    title: str
    formula: str
    equations: str
    inputs: tuple[FormulaInput, ...]
    note: str = ""


# -- where a number comes from -------------------------------------------------------------------------


def sources(scenario: Scenario, result: Result, own: Collection[str] = ()) -> list[ProvenanceEntry]:
    """Every number behind a result: what the scenario states, then every sourced number and curve.

    `own`: keys that the visitor has changed.
    """
    batch = scenario.batch
    values = {
        "model": (scenario.shape.n_layers, "layers"),
        "batch.sequences": (batch.sequences, "count"),
        "batch.sequence_length": (batch.sequence_length, "count"),
        "run.tokens": (scenario.run.tokens, "count"),
    }
    if scenario.fleet is None:
        values["cluster.nodes"] = (scenario.machine.nodes, "count")
    chosen = {default.key: default for default in result.defaults}
    rows, kind = [], ""
    for key, (value, unit) in values.items():
        if key in chosen:  # by a rule, as nobody stated it
            kind, source = chosen[key].kind, chosen[key].source
        else:
            kind, source = "stated", f"stated in the scenario {scenario.name}"
            if any(key == k or key.startswith(f"{k}.") for k in own):
                source = "stated by you"
            elif key == "model":
                source = f"{scenario.shape.name}: {scenario.shape.source.reference}"
        rows.append(
            ProvenanceEntry(path=key, value=float(value), unit=unit, kind=kind, source=source, date="")
        )
    return [*rows, *(entry for entry in result.provenance if entry.path not in values)]


# -- the figures ---------------------------------------------------------------------------------------

MEANINGS: Mapping[str, tuple[str, str]] = {
    "T_tok": ("tokens of a step", "batch."),
    "t_step": ("step time", "profile."),
    "T_run": ("tokens of the run", "run.tokens"),
    "peak": ("datasheet peak of a GPU in BF16", "peak.bf16"),
    "price": ("price of a GPU-hour", "price_per_gpu_hour"),
    "rate": ("FLOP/s of a GPU", "model"),
    "T": ("days of the whole run", "run."),
    "nodes": ("nodes and spares", "cluster.nodes"),
    "P_node": ("power of a node under load", "power"),
    "PUE": ("power usage effectiveness", "pue"),
    "kWh": ("energy", "cluster.energy"),
    "intensity": ("CO₂e of a kWh", "carbon_intensity"),
}
"""What a symbol means, and the row of the page Evidence that has its source."""

STEPS = "ceil(T_run / T_tok)"
FIGURES: Mapping[str, tuple[str, str, str]] = {
    "step_time_s": ("Step time", "", "eq. T1, pipeline rank 0"),
    "tokens_per_s_per_gpu": ("Tokens/s/GPU", "T_tok / (t_step * N)", "eq. F4 without φ"),
    "mfu_causal": ("MFU, causal", "", "eqs. F4, F5"),
    "mfu_noncausal": ("MFU, non-causal", "", "eqs. F4, F5"),
    "days": ("Duration", f"{STEPS} * t_step / 86400", "eq. F6"),
    "gpu_hours": ("GPU-hours", f"{STEPS} * t_step * N / 3600", "eq. F6"),
    "tokens_per_day": ("Tokens a day", "T_tok / t_step * 86400", "eq. F4 without φ"),
    "memory_bytes": ("Memory of the fullest GPU", "", "eq. M5"),
    "cost_usd": ("Cost", f"{STEPS} * t_step * N / 3600 * price", "eq. F6"),
}
"""Title, formula and equations of each figure; an empty formula depends on the scenario."""

PARTS: Mapping[str, tuple[str, str]] = {
    "forward": ("t_F", "forward"),
    "backward_input": ("t_B", "backward, input gradient"),
    "backward_weight": ("t_W", "backward, weight gradient"),
    "forward_backward": ("t_FB", "overlapped pairs"),
    "bubble": ("bubble", "bubble"),
    "optimizer": ("opt", "gradients and optimizer"),
}
"""Symbol and meaning of the parts of a step of pipeline rank 0."""

_SYMBOL = re.compile(r"[^\W\d]\w*")


def _known(symbol: str, value: float, text: str, source: str) -> FormulaInput:
    """The input of a symbol that MEANINGS has."""
    meaning, find = MEANINGS[symbol]
    return FormulaInput(symbol, meaning, float(value), text, source, find)


def _derived(
    figure: str, title: str, formula: str, equations: str, known: Iterable[FormulaInput], note: str = ""
) -> Derivation:
    """A derivation with those of the `known` inputs that its formula names, in the formula's order."""
    inputs = {item.symbol: item for item in known}
    named = (inputs[symbol] for symbol in dict.fromkeys(_SYMBOL.findall(formula)) if symbol in inputs)
    return Derivation(figure, title, formula, equations, tuple(named), note)


def _sum(parts: Sequence[FormulaInput]) -> str:
    return " + ".join(part.symbol for part in parts)


def derivations(scenario: Scenario, result: Result, own: Collection[str] = ()) -> dict[str, Derivation]:
    """How every headline figure of a result comes about, by the figure's name.

    `own`: keys that the visitor has changed. A figure that a result does not have is left out.
    """
    source = {row.path: row.source for row in sources(scenario, result, own)}
    known, memory = _symbols(scenario, result, source), result.memory
    kinds = [
        FormulaInput(
            kind,
            kind.replace("_", " "),
            float(size),
            written("memory_bytes", size),
            _source(scenario, source, "memory.framework")
            if kind == "framework"
            else "counted from model and plan (eqs. M1 to M4)",
            "memory.framework" if kind == "framework" else "model",
        )
        for kind, size in memory.by_kind_bytes.items()
        if size > 0.0
    ]
    least, most = (written("memory_bytes", size) for size in memory.range_bytes)
    step = result.step
    of_step = [
        FormulaInput(symbol, meaning, value, f"{value:.3f} s", SIMULATED, "profile.")
        for key, (symbol, meaning) in PARTS.items()
        if (value := float(getattr(result.breakdown_s, key))) > 0.0
    ]
    within = f"between the bounds {step.lower_bound_s:.3f} s and {step.upper_bound_s:.3f} s (eqs. B1, B2)."
    special = {
        "step_time_s": (_sum(of_step), of_step, f"Event by event (eqs. E1 to E7), {within}"),
        "mfu_causal": (*_rate(scenario, result, source, causal=True), ""),
        "mfu_noncausal": (*_rate(scenario, result, source, causal=False), ""),
        "memory_bytes": (_sum(kinds), kinds, f"{least} to {most} by framework and allocator (eq. M10)."),
    }
    found = {}
    for figure, (title, fixed, equations) in FIGURES.items():
        formula, more, note = special.get(figure, (fixed, [], ""))
        if figure != "cost_usd" or result.run.cost_usd is not None:
            found[figure] = _derived(figure, title, formula, equations, [*known, *more], note)
    return found


def _source(scenario: Scenario, source: Mapping[str, str], path: str) -> str:
    """The source of a row, or where the scenario has it from."""
    return source.get(path, f"stated in the scenario {scenario.name}")


def _symbols(scenario: Scenario, result: Result, source: Mapping[str, str]) -> list[FormulaInput]:
    """The inputs that headline figures share; peak and price are means over the GPUs of a fleet."""
    batch, step, machines, run_tokens = scenario.batch, result.step, scenario.machines, result.run.tokens
    number = sum(machine.n_gpus for machine in machines)
    nodes = ", ".join(f"{m.nodes:,} nodes of {m.node.n_gpus}" for m in machines)
    gpus_from = ("the pools of the fleet", "node.gpus")
    if scenario.fleet is None:
        gpus_from = (_source(scenario, source, "cluster.nodes"), "cluster.nodes")
    peak = sum(m.n_gpus * m.accelerator.peak_flop_per_s("bf16") for m in machines) / number
    peak_from = next((text for path, text in source.items() if path.endswith("peak.bf16")), "")
    known = [(m.n_gpus, m.price_per_gpu_hour) for m in machines]
    usd = sum(n * price.value for n, price in known if price is not None) / number
    priced = dict.fromkeys(text for path, text in source.items() if path.endswith("price_per_gpu_hour"))
    tokens = f"{compact(step.tokens)} ({batch.sequences:,} sequences of {batch.sequence_length:,})"
    return [
        _known("T_tok", step.tokens, tokens, _source(scenario, source, "batch.sequences")),
        _known("t_step", step.time_s, f"{step.time_s:.3f} s", SIMULATED),
        FormulaInput("N", "GPUs", float(number), f"{number:,} ({nodes})", *gpus_from),
        _known(
            "peak",
            peak,
            format_quantity(peak, "flop_per_s"),
            peak_from or "the accelerator's description",
        ),
        _known("T_run", run_tokens, compact(run_tokens), _source(scenario, source, "run.tokens")),
        _known("price", usd, f"${plain(usd, 4)}", "; ".join(priced) or "the cluster's description"),
    ]


def _rate(
    scenario: Scenario, result: Result, source: Mapping[str, str], causal: bool
) -> tuple[str, list[FormulaInput]]:
    """(MFU as a formula, its work); of the simulated rate where dropped rows do not count."""
    step = result.step
    teraflops = step.tflops_per_gpu_causal if causal else step.tflops_per_gpu_noncausal
    flop = flop_per_token(scenario.shape, scenario.batch.sequence_length, causal)
    if not isclose(flop * step.tokens_per_s_per_gpu, teraflops * 1e12, rel_tol=1e-9):
        text = f"{teraflops:.4g} TFLOP/s, without dropped rows"
        return "rate / peak", [_known("rate", teraflops * 1e12, text, "simulated (eq. F4)")]
    meaning = f"FLOPs of a token, {'causal half' if causal else 'full attention'} (eqs. F2, F3)"
    text, where = f"{flop / 1e9:.4g} GFLOP", _source(scenario, source, "model")
    work = FormulaInput("φ", meaning, float(flop), text, where, "model")
    return "φ * T_tok / (t_step * N * peak)", [work]


def in_words(formula: str) -> str:
    """A formula as people write it."""
    return formula.replace(" * ", " · ").replace("ceil(T_run / T_tok)", "⌈T_run / T_tok⌉")


# -- run explanations --------------------------------------------------------------------------------
# How each figure of the page Run & cost comes about: formula, inputs with today's values, sources.

STOPS = "simulated from the stated failures, restarts and checkpoints (docs/model, chapter 13)"

USES = {
    "productive": ("train", "training"),
    "startup": ("start", "start-up (eq. J10)"),
    "checkpoints": ("save", "checkpoints (eqs. J2, J3)"),
    "lost": ("again", "training done again"),
    "detection": ("detect", "detection"),
    "restart": ("restart", "restarts"),
    "waiting_for_spares": ("wait", "waiting for spares"),
    "slow_nodes": ("slow", "slow nodes"),
    "fewer_groups": ("away", "groups that are away"),
    "fault_tolerance": ("tolerance", "fault tolerance"),
    "planned": ("planned", "maintenance"),
}
"""Symbol and meaning of each use of the job's GPU-hours."""


def run_derivations(
    scenario: Scenario, result: Result, report: RunReport, own: Collection[str] = ()
) -> dict[str, Derivation]:
    """How the figures of a whole run come about, by name; what the run has no price or site for is left out.

    `result` is the priced result with `report`. `own`: keys that the visitor has changed.
    """
    source = {row.path: row.source for row in sources(scenario, result, own)}
    gpus, days = scenario.machine.n_gpus, report.days.predicted
    nodes_from = _source(scenario, source, "cluster.nodes")
    parts = [
        _hours(symbol, meaning, hours)
        for key, (symbol, meaning) in USES.items()
        if (hours := float(getattr(report.gpu_hours, key))) > 0.0
    ]
    count = FormulaInput("N", "GPUs", float(gpus), f"{gpus:,}", nodes_from, "cluster.nodes")
    note = f"The mean over the random stops of {report.replicas:,} runs."
    used, equations = _sum(parts), "eqs. J1, J4, J9, J10"
    formula = f"({used}) / (24 * N)" if len(parts) > 1 else f"{used} / (24 * N)"
    found = [_derived("days", "Days of the whole run", formula, equations, [*parts, count], note)]
    phases = [phase for phase in report.phases if not phase.stated]
    hours = sum(phase.gpu_hours for phase in phases)
    total = sum(phase.gpu_hours_with_stops for phase in phases)
    parts = [_hours("train", "training", hours), _hours("all", "training and stops", total)]
    note = (
        f"The mean of the shares of {report.replicas:,} runs; the share of the means is {hours / total:.2%}. "
        f"The closed form gives {report.goodput_expected:.1%}."
    )
    found.append(_derived("goodput", "Goodput", "train / all", "eq. J5", parts, note))
    causes = [
        FormulaInput(f"n{number}", row.cause, row.interruptions, plain(row.interruptions), STOPS, "run.")
        for number, row in enumerate(report.causes, 1)
    ]
    formula, note = _sum(causes), "The run states no failures."
    found.append(
        _derived("interruptions", "Interruptions", formula or "0", "eq. J4", causes, "" if causes else note)
    )
    time = _known("T", days, f"{days:,.1f} days", STOPS)
    if report.cost_usd is not None:
        found.append(_cost(scenario, report, source, time))
    found += _energy(scenario, report, source, time)
    return {row.figure: row for row in found}


def _hours(symbol: str, meaning: str, hours: float) -> FormulaInput:
    return FormulaInput(symbol, meaning, hours, f"{compact(hours)} GPU-hours", STOPS, "run.")


def _cost(scenario: Scenario, report: RunReport, source: Mapping[str, str], time: FormulaInput) -> Derivation:
    run = scenario.run
    bill = rates(scenario.machine, run.price, run.spares.count if run.spares else 0)
    wanted = "cluster.price_per_gpu_hour" if run.price is None else "run.price"
    find = wanted if any(wanted in path for path in source) else "price"  # a published offer has no row
    parts = [
        FormulaInput(f"r{number}", f"{part}, an hour", usd, f"${compact(usd)}", report.price, find)
        for number, (part, usd) in enumerate((bill.usd_per_hour or {}).items(), 1)
    ]
    rent, note = _sum(parts), f"For {bill.gpus:,} GPUs with the spares."
    formula = f"T * 24 * ({rent})" if len(parts) > 1 else f"T * 24 * {rent}"
    return _derived("cost_usd", "Cost of the whole run", formula, "eq. J7", [time, *parts], note)


def _energy(
    scenario: Scenario, report: RunReport, source: Mapping[str, str], time: FormulaInput
) -> list[Derivation]:
    """Energy and its CO₂e, where the site is known."""
    site, energy = scenario.machine.energy, report.energy_kwh
    if site is None or energy is None or report.co2_kg is None:
        return []
    machine, spares = scenario.machine, scenario.run.spares
    nodes = machine.nodes + (spares.count if spares else 0)
    power = machine.node.n_gpus * machine.node.power_w_per_gpu
    power_from = source.get("cluster.node.power", "the node's description")
    known = [
        time,
        _known("nodes", nodes, f"{nodes:,}", _source(scenario, source, "cluster.nodes")),
        _known("P_node", power, format_quantity(power, "w"), power_from),
        _known("PUE", site.pue.value, plain(site.pue.value), site.pue.source),
    ]
    formula = "T * 24 * nodes * P_node / 1000 * PUE"
    kwh = _derived("energy_kwh", "Energy", formula, "eq. J8", known)
    carbon = site.carbon_intensity
    known = [
        _known("kWh", energy.predicted, f"{compact(energy.predicted)} kWh", "eq. J8"),
        _known("intensity", carbon.value, f"{plain(carbon.value, 4)} kg", carbon.source),
    ]
    return [kwh, _derived("co2_kg", "CO₂e", "kWh * intensity", "eq. J8", known)]


# -- tooltips ----------------------------------------------------------------------------------------
# Help texts of figures in Markdown: formula, inputs with today's values, sources, links to Evidence.

MOST_SOURCE_CHARACTERS = 140
"""Characters of a source that a tooltip shows; Evidence has all of it."""


def of_result(scenario: Scenario, result: Result) -> dict[str, str]:
    """The help text of every headline figure, by the figure's name; sources open in the page Evidence."""
    own = [overridden_key(text) for text in state.overrides()]
    return texts(derivations(scenario, result, own), address())


def address() -> dict[str, list[str] | str]:
    """Query parameters of the scenario of this session, which links to other pages keep."""
    return dict(changes.parameters(state.preset(), state.overrides()))


def texts(derivations: Mapping[str, Derivation], query: Mapping[str, list[str] | str]) -> dict[str, str]:
    """Help texts in Markdown by the figure's name; text of a scenario in them is shown literally."""
    return {name: text(row, query) for name, row in derivations.items()}


def text(row: Derivation, query: Mapping[str, list[str] | str]) -> str:
    """One help text: the formula, then every input with its value, its source and a link to its row."""
    lines = [f"**{row.title}** (docs/model, {row.equations})", "", f"`{in_words(row.formula)}`", ""]
    for (source, find), items in groupby(row.inputs, key=lambda item: (item.source, item.find)):
        group = list(items)
        short = source
        if len(source) > MOST_SOURCE_CHARACTERS:
            short = source[:MOST_SOURCE_CHARACTERS].rsplit(" ", 1)[0] + " …"
        fields = [f"evidence.find={json.dumps(find)}", f"evidence.part={json.dumps('numbers')}"]
        address = urlencode({**query, forms.PARAMETER: fields}, doseq=True)
        origin = f"{escaped(short)} ([Evidence](evidence?{address}))"
        for item in group:
            meaning = "" if item.meaning == item.symbol else f" {escaped(item.meaning)}"
            end = f"; source: {origin}" if len(group) == 1 else ""
            lines.append(f"- `{item.symbol}`{meaning}: **{escaped(item.text)}**{end}")
        if len(group) > 1:
            lines.append(f"- source of these: {origin}")
    if row.note:
        lines += ["", escaped(row.note)]
    return "\n".join(lines)


def panel(helps: Mapping[str, str]) -> None:
    """The help texts of a page below each other, for the keyboard and for touch, which open no tooltip."""
    with st.expander("How these figures come about: formulas, inputs and sources"):
        columns = st.columns(2, gap="large")
        for number, text_ in enumerate(helps.values()):
            columns[number % 2].markdown(text_)
