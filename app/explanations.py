"""How each headline figure of a result comes about: formula, inputs with today's values, sources.

A formula is arithmetic over the symbols of its inputs in SI units, so that it can be evaluated, and carries
the label of its equation in docs/model.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import isclose

from moesim.app.number_text import compact, plain, written
from moesim.hwmodels.units import format_quantity
from moesim.simulator.model.counts import flop_per_token
from moesim.simulator.predict.result import Result
from moesim.simulator.predict.result_parts import ProvenanceEntry
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
