"""How each headline figure of a result comes about: formula, inputs with today's values, sources.

A formula is arithmetic over the symbols of its inputs in SI units, so that it can be evaluated, and carries
the label of its equation in docs/model.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import groupby
from math import isclose
from urllib.parse import urlencode

import streamlit as st

from moesim.app import forms, state
from moesim.app import scenario_links as changes
from moesim.app.texts import compact, escaped, plain, written
from moesim.hwmodels.units import format_quantity
from moesim.simulator.common.texts import overridden_key
from moesim.simulator.model.counts import flop_per_token
from moesim.simulator.predict.result import Result
from moesim.simulator.predict.result_parts import ProvenanceEntry
from moesim.simulator.run.report import RunReport, rates
from moesim.simulator.scenario import Scenario

SIMULATED = "simulated by this version (docs/model, chapter 7)"
"""Source of the seconds of a step; the numbers behind them are all rows of Evidence."""


@dataclass(frozen=True, slots=True)
class FormulaInput:
    """One symbol of a formula: its meaning, value in SI units, the value as text, and where it comes from.

    `find`: the row of the page Evidence that has its source.
    """

    symbol: str
    meaning: str
    value: float
    text: str
    source: str
    find: str


@dataclass(frozen=True, slots=True)
class Derivation:
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
    batch, run = scenario.batch, scenario.run
    rows = [
        _stated(scenario, result, own, "model", float(scenario.shape.n_layers), "layers"),
        _stated(scenario, result, own, "batch.sequences", float(batch.sequences), "count"),
        _stated(scenario, result, own, "batch.sequence_length", float(batch.sequence_length), "count"),
        _stated(scenario, result, own, "run.tokens", float(run.tokens), "count"),
    ]
    if scenario.fleet is None:
        rows.append(_stated(scenario, result, own, "cluster.nodes", float(scenario.machine.nodes), "count"))
    kept = {row.path for row in rows}
    return [*rows, *(entry for entry in result.provenance if entry.path not in kept)]


def _stated(
    scenario: Scenario, result: Result, own: Collection[str], key: str, value: float, unit: str
) -> ProvenanceEntry:
    """The row of a number that the scenario states, or that a default rule chose."""
    default = next((d for d in result.defaults if d.key == key), None)
    if default is not None:
        return ProvenanceEntry(
            path=key, value=value, unit=unit, kind=default.kind, source=default.source, date=""
        )
    part = next((k for k in own if key == k or key.startswith(f"{k}.")), None)
    if part is not None:
        source = "stated by you"
    elif key == "model":
        source = f"{scenario.shape.name}: {scenario.shape.source.reference}"
    else:
        source = f"stated in the scenario {scenario.name}"
    return ProvenanceEntry(path=key, value=value, unit=unit, kind="stated", source=source, date="")


@dataclass(frozen=True, slots=True)
class _InputReader:
    """What the inputs of all formulas are read from."""

    scenario: Scenario
    result: Result
    rows: Mapping[str, ProvenanceEntry]

    def source(self, path: str) -> str:
        """The source of a row, or where the scenario has it from."""
        row = self.rows.get(path)
        return f"stated in the scenario {self.scenario.name}" if row is None else row.source

    def tokens(self) -> FormulaInput:
        """Tokens of a step."""
        batch, tokens = self.scenario.batch, self.result.step.tokens
        text = f"{compact(tokens)} ({batch.sequences:,} sequences of {batch.sequence_length:,})"
        return _input("T_tok", "tokens of a step", tokens, text, self.source("batch.sequences"), "batch.")

    def step(self) -> FormulaInput:
        """Seconds of a step."""
        time_s = self.result.step.time_s
        return _input("t_step", "step time", time_s, f"{time_s:.3f} s", SIMULATED, "profile.")

    def gpus(self) -> FormulaInput:
        """Number of GPUs."""
        machines = self.scenario.machines
        number = sum(machine.n_gpus for machine in machines)
        text = ", ".join(f"{m.nodes:,} nodes of {m.node.n_gpus}" for m in machines)
        one = self.scenario.fleet is None
        source = self.source("cluster.nodes") if one else "the pools of the fleet"
        return _input(
            "N", "GPUs", number, f"{number:,} ({text})", source, "cluster.nodes" if one else "node.gpus"
        )

    def peak(self) -> FormulaInput:
        """Datasheet peak of a GPU in BF16; the mean over the GPUs of a fleet."""
        machines = self.scenario.machines
        number = sum(machine.n_gpus for machine in machines)
        peak = sum(m.n_gpus * m.accelerator.peak_flop_per_s("bf16") for m in machines) / number
        source = next((row.source for path, row in self.rows.items() if path.endswith("peak.bf16")), "")
        return _input(
            "peak",
            "datasheet peak of a GPU in BF16",
            peak,
            format_quantity(peak, "flop_per_s"),
            source or "the accelerator's description",
            "peak.bf16",
        )

    def rate(self, causal: bool) -> tuple[str, tuple[FormulaInput, ...]]:
        """(FLOP/s of a GPU as a formula, its inputs); the rate itself where dropped rows do not count."""
        step, shape = self.result.step, self.scenario.shape
        teraflops = step.tflops_per_gpu_causal if causal else step.tflops_per_gpu_noncausal
        flop = flop_per_token(shape, self.scenario.batch.sequence_length, causal)
        tokens, time, gpus = self.tokens(), self.step(), self.gpus()
        if not isclose(flop * step.tokens_per_s_per_gpu, teraflops * 1e12, rel_tol=1e-9):
            text = f"{teraflops:.4g} TFLOP/s, without dropped rows"
            return "rate", (
                _input("rate", "FLOP/s of a GPU", teraflops * 1e12, text, "simulated (eq. F4)", "model"),
            )
        half = "causal half" if causal else "full attention"
        work = _input(
            "φ",
            f"FLOPs of a token, {half} (eqs. F2, F3)",
            flop,
            f"{flop / 1e9:.4g} GFLOP",
            self.source("model"),
            "model",
        )
        return "φ * T_tok / (t_step * N)", (work, tokens, time, gpus)

    def run_tokens(self) -> FormulaInput:
        """Tokens of the main phase."""
        tokens = self.result.run.tokens
        return _input(
            "T_run", "tokens of the run", tokens, compact(tokens), self.source("run.tokens"), "run.tokens"
        )

    def price(self) -> FormulaInput:
        """Dollars of a GPU-hour; the mean over the GPUs of a fleet."""
        machines = self.scenario.machines
        number = sum(machine.n_gpus for machine in machines)
        known = [(m.n_gpus, m.price_per_gpu_hour) for m in machines]
        usd = sum(n * price.value for n, price in known if price is not None) / number
        rows = [row for path, row in self.rows.items() if path.endswith("price_per_gpu_hour")]
        source = "; ".join(dict.fromkeys(row.source for row in rows)) or "the cluster's description"
        return _input("price", "price of a GPU-hour", usd, f"${plain(usd, 4)}", source, "price_per_gpu_hour")


def _input(symbol: str, meaning: str, value: float, text: str, source: str, find: str) -> FormulaInput:
    return FormulaInput(symbol, meaning, float(value), text, source, find)


# -- the figures ---------------------------------------------------------------------------------------


def derivations(scenario: Scenario, result: Result, own: Collection[str] = ()) -> dict[str, Derivation]:
    """How every headline figure of a result comes about, by the figure's name.

    `own`: keys that the visitor has changed. A figure that a result does not have is left out.
    """
    book = _InputReader(scenario, result, {row.path: row for row in sources(scenario, result, own)})
    tokens, step, gpus, run = book.tokens(), book.step(), book.gpus(), book.run_tokens()
    causal, noncausal = book.rate(True), book.rate(False)
    steps = "ceil(T_run / T_tok)"
    found = [
        _step_time(book),
        Derivation(
            "tokens_per_s_per_gpu",
            "Tokens/s/GPU",
            "T_tok / (t_step * N)",
            "eq. F4 without φ",
            (tokens, step, gpus),
        ),
        Derivation("mfu_causal", "MFU, causal", _over(causal[0]), "eqs. F4, F5", (*causal[1], book.peak())),
        Derivation(
            "mfu_noncausal",
            "MFU, non-causal",
            _over(noncausal[0]),
            "eqs. F4, F5",
            (*noncausal[1], book.peak()),
        ),
        Derivation("days", "Duration", f"{steps} * t_step / 86400", "eq. F6", (run, tokens, step)),
        Derivation(
            "gpu_hours", "GPU-hours", f"{steps} * t_step * N / 3600", "eq. F6", (run, tokens, step, gpus)
        ),
        Derivation(
            "tokens_per_day", "Tokens a day", "T_tok / t_step * 86400", "eq. F4 without φ", (tokens, step)
        ),
        _memory(book),
    ]
    if result.run.cost_usd is not None:
        inputs = (run, tokens, step, gpus, book.price())
        found.append(Derivation("cost_usd", "Cost", f"{steps} * t_step * N / 3600 * price", "eq. F6", inputs))
    return {row.figure: row for row in found}


def _over(rate: str) -> str:
    return "rate / peak" if rate == "rate" else rate.replace("(t_step * N)", "(t_step * N * peak)")


PARTS: Mapping[str, tuple[str, str]] = {
    "forward": ("t_F", "forward"),
    "backward_input": ("t_B", "backward, input gradient"),
    "backward_weight": ("t_W", "backward, weight gradient"),
    "forward_backward": ("t_FB", "overlapped pairs"),
    "bubble": ("bubble", "bubble"),
    "optimizer": ("opt", "gradients and optimizer"),
}
"""Symbol and meaning of the parts of a step of pipeline rank 0."""


def _step_time(book: _InputReader) -> Derivation:
    split, step = book.result.breakdown_s, book.result.step
    inputs = tuple(
        _input(symbol, meaning, value, f"{value:.3f} s", SIMULATED, "profile.")
        for key, (symbol, meaning) in PARTS.items()
        if (value := float(getattr(split, key))) > 0.0
    )
    return Derivation(
        "step_time_s",
        "Step time",
        " + ".join(item.symbol for item in inputs),
        "eq. T1, pipeline rank 0",
        inputs,
        f"Event by event (eqs. E1 to E7), between the bounds {step.lower_bound_s:.3f} s and "
        f"{step.upper_bound_s:.3f} s (eqs. B1, B2).",
    )


def _memory(book: _InputReader) -> Derivation:
    memory = book.result.memory
    inputs = tuple(
        _input(
            kind,
            kind.replace("_", " "),
            size,
            written("memory_bytes", size),
            book.source("memory.framework")
            if kind == "framework"
            else "counted from model and plan (eqs. M1 to M4)",
            "memory.framework" if kind == "framework" else "model",
        )
        for kind, size in memory.by_kind_bytes.items()
        if size > 0.0
    )
    least, most = (written("memory_bytes", size) for size in memory.range_bytes)
    return Derivation(
        "memory_bytes",
        "Memory of the fullest GPU",
        " + ".join(item.symbol for item in inputs),
        "eq. M5",
        inputs,
        f"{least} to {most} by framework and allocator (eq. M10).",
    )


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
}
"""Symbol and meaning of each use of the job's GPU-hours."""


def run_derivations(
    scenario: Scenario, result: Result, report: RunReport, own: Collection[str] = ()
) -> dict[str, Derivation]:
    """How the figures of a whole run come about, by name; what the run has no price or site for is left out.

    `result` is the priced result with `report`. `own`: keys that the visitor has changed.
    """
    source = {row.path: row.source for row in sources(scenario, result, own)}
    nodes = source.get("cluster.nodes", f"stated in the scenario {scenario.name}")
    gpus = scenario.machine.n_gpus
    count = FormulaInput("N", "GPUs", float(gpus), f"{gpus:,}", nodes, "cluster.nodes")
    found = [_days(report, count), _goodput(report), _interruptions(report)]
    if report.cost_usd is not None:
        found.append(_cost(scenario, report, source))
    if report.energy_kwh is not None and report.co2_kg is not None:
        found += [_energy(scenario, report, source), _carbon(scenario, report)]
    return {row.figure: row for row in found}


def _hours(symbol: str, meaning: str, hours: float) -> FormulaInput:
    return FormulaInput(symbol, meaning, hours, f"{compact(hours)} GPU-hours", STOPS, "run.")


def _days(report: RunReport, count: FormulaInput) -> Derivation:
    parts = [
        _hours(symbol, meaning, hours)
        for key, (symbol, meaning) in USES.items()
        if (hours := float(getattr(report.gpu_hours, key))) > 0.0
    ]
    total = " + ".join(part.symbol for part in parts)
    return Derivation(
        "days",
        "Days of the whole run",
        f"({total}) / (24 * N)" if len(parts) > 1 else f"{total} / (24 * N)",
        "eqs. J1, J4, J9, J10",
        (*parts, count),
        f"The mean over the random stops of {report.replicas:,} runs.",
    )


def _goodput(report: RunReport) -> Derivation:
    own = [phase for phase in report.phases if not phase.stated]
    hours = sum(phase.gpu_hours for phase in own)
    total = sum(phase.gpu_hours_with_stops for phase in own)
    return Derivation(
        "goodput",
        "Goodput",
        "train / all",
        "eq. J5",
        (_hours("train", "training", hours), _hours("all", "training and stops", total)),
        f"The mean of the shares of {report.replicas:,} runs; the share of the means is {hours / total:.2%}. "
        f"The closed form gives {report.goodput_expected:.1%}.",
    )


def _interruptions(report: RunReport) -> Derivation:
    causes = tuple(
        FormulaInput(f"n{number}", row.cause, row.interruptions, plain(row.interruptions), STOPS, "run.")
        for number, row in enumerate(report.causes, 1)
    )
    return Derivation(
        "interruptions",
        "Interruptions",
        " + ".join(cause.symbol for cause in causes) or "0",
        "eq. J4",
        causes,
        "" if causes else "The run states no failures.",
    )


def _time(report: RunReport) -> FormulaInput:
    days = report.days.predicted
    return FormulaInput("T", "days of the whole run", days, f"{days:,.1f} days", STOPS, "run.")


def _cost(scenario: Scenario, report: RunReport, source: dict[str, str]) -> Derivation:
    run = scenario.run
    bill = rates(scenario.machine, run.price, run.spares.count if run.spares else 0)
    wanted = "cluster.price_per_gpu_hour" if run.price is None else "run.price"
    find = wanted if any(wanted in path for path in source) else "price"  # a published offer has no row
    parts = tuple(
        FormulaInput(f"r{number}", f"{part}, an hour", usd, f"${compact(usd)}", report.price, find)
        for number, (part, usd) in enumerate((bill.usd_per_hour or {}).items(), 1)
    )
    total = " + ".join(part.symbol for part in parts)
    return Derivation(
        "cost_usd",
        "Cost of the whole run",
        f"T * 24 * ({total})" if len(parts) > 1 else f"T * 24 * {total}",
        "eq. J7",
        (_time(report), *parts),
        f"For {bill.gpus:,} GPUs with the spares.",
    )


def _energy(scenario: Scenario, report: RunReport, source: dict[str, str]) -> Derivation:
    machine, site = scenario.machine, scenario.machine.energy
    assert site is not None  # the report has an energy
    spares = scenario.run.spares.count if scenario.run.spares else 0
    nodes, power = machine.nodes + spares, machine.node.n_gpus * machine.node.power_w_per_gpu
    inputs = (
        _time(report),
        FormulaInput(
            "nodes",
            "nodes and spares",
            float(nodes),
            f"{nodes:,}",
            source.get("cluster.nodes", f"stated in the scenario {scenario.name}"),
            "cluster.nodes",
        ),
        FormulaInput(
            "P_node",
            "power of a node under load",
            power,
            format_quantity(power, "w"),
            source.get("cluster.node.power", "the node's description"),
            "power",
        ),
        FormulaInput(
            "PUE", "power usage effectiveness", site.pue.value, plain(site.pue.value), site.pue.source, "pue"
        ),
    )
    return Derivation("energy_kwh", "Energy", "T * 24 * nodes * P_node / 1000 * PUE", "eq. J8", inputs)


def _carbon(scenario: Scenario, report: RunReport) -> Derivation:
    site, energy = scenario.machine.energy, report.energy_kwh
    assert site is not None and energy is not None
    intensity = site.carbon_intensity
    inputs = (
        FormulaInput(
            "kWh", "energy", energy.predicted, f"{compact(energy.predicted)} kWh", "eq. J8", "cluster.energy"
        ),
        FormulaInput(
            "intensity",
            "CO₂e of a kWh",
            intensity.value,
            f"{plain(intensity.value, 4)} kg",
            intensity.source,
            "carbon_intensity",
        ),
    )
    return Derivation("co2_kg", "CO₂e", "kWh * intensity", "eq. J8", inputs)


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


def evidence_link(query: Mapping[str, list[str] | str], find: str) -> str:
    """Address of the page Evidence, opened at the numbers that `find` finds, below the server's root."""
    fields = [f"evidence.find={json.dumps(find)}", f"evidence.part={json.dumps('numbers')}"]
    return f"evidence?{urlencode({**query, forms.PARAMETER: fields}, doseq=True)}"


def texts(found: Mapping[str, Derivation], query: Mapping[str, list[str] | str]) -> dict[str, str]:
    """Help texts in Markdown by the figure's name; text of a scenario in them is shown literally."""
    return {name: text(row, query) for name, row in found.items()}


def text(row: Derivation, query: Mapping[str, list[str] | str]) -> str:
    """One help text: the formula, then every input with its value, its source and a link to its row."""
    lines = [f"**{row.title}** (docs/model, {row.equations})", "", f"`{in_words(row.formula)}`", ""]
    for (source, find), items in groupby(row.inputs, key=lambda item: (item.source, item.find)):
        group = list(items)
        origin = f"{escaped(_cut(source))} ([Evidence]({evidence_link(query, find)}))"
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


def _cut(source: str) -> str:
    if len(source) <= MOST_SOURCE_CHARACTERS:
        return source
    return source[:MOST_SOURCE_CHARACTERS].rsplit(" ", 1)[0] + " …"
