"""The commands `trace ...`: a profiler's trace of a step, read and summarised."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moesim.cli.console import (
    AsJson,
    Force,
    Overrides,
    ScenarioName,
    check_new,
    chosen_numbers,
    print_json,
    print_table,
    print_text,
    say_written,
    working,
)

if TYPE_CHECKING:
    from moesim.simulator.trace import StepTrace
    from moesim.simulator.trace.compare import TraceComparison

MOST_STEPS = 12
"""Steps that are shown as text; --json has all."""


def read_trace(
    file: Annotated[
        Path, typer.Argument(metavar="FILE|FOLDER", help="A trace, or a folder with one file a rank.")
    ],
    rules: Annotated[Path | None, typer.Option(help="Your own rules for kernel names (YAML).")] = None,
    as_json: AsJson = False,
) -> None:
    """Read a trace: what ran, in classes of our model, what it waited for, and why the GPU was idle.

    Reads Kineto and Chrome JSON (plain, gz, zst), Nsight Systems SQLite, Chakra execution traces and the H800
    timeline's CSV. Nothing of a file is executed.
    """
    from moesim.simulator.trace import read

    with working(f"reading {file.name}") as say:
        trace = read(file, rules, say)
    if as_json:
        print_json(trace.table())
        return
    _show(trace)


def compare_trace(
    file: Annotated[
        Path, typer.Argument(metavar="FILE|FOLDER", help="A trace, or a folder with one file a rank.")
    ],
    other: Annotated[
        str, typer.Argument(metavar="SCENARIO|FILE2", help="A preset, a scenario's file, or another trace.")
    ],
    settings: Overrides = None,
    rank: Annotated[int | None, typer.Option(help="Rank; default: the one for which others wait.")] = None,
    step: Annotated[int | None, typer.Option(help="Step; default: the one of median wall time.")] = None,
    rules: Annotated[Path | None, typer.Option(help="Your own rules for kernel names (YAML).")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write the bars to this file.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page that loads nothing.")] = None,
    perfetto: Annotated[Path | None, typer.Option(help="Write both steps (.json or .json.gz).")] = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Set a traced step beside a prediction, or beside another trace: where the time goes, and why.

    The differences of the parts add up to the gap exactly. Findings name plans that differ first, then
    causes, then what follows from them.
    """
    from moesim.hwmodels.files import write_atomically
    from moesim.simulator.trace import compare_output
    from moesim.simulator.trace.compare import compared

    for path in (csv, html, perfetto):
        if path is not None:
            check_new(path, force)
    with working(f"reading {file.name}") as say:
        found = compared(file, other, settings or (), rank=rank, step=step, rules=rules, said=say)
    if csv is not None:
        write_atomically(csv, iter([compare_output.bars_csv(found)]))
    if html is not None:
        write_atomically(html, iter([compare_output.page(found)]))
    if perfetto is not None:
        compare_output.write_perfetto(perfetto, found)
    if as_json:
        print_json(found.table())
    else:
        _show_comparison(found)


def export_trace(
    scenario: ScenarioName,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE|FOLDER", help="One rank's file, or a folder.")
    ],
    form: Annotated[
        str, typer.Option("--as", help="kineto (HTA, TraceLens, Perfetto) or chakra.")
    ] = "kineto",
    settings: Overrides = None,
    ranks: Annotated[
        str | None,
        typer.Option(help="GPUs: 0,16 or 0-63 or all; default: the first of each pipeline rank."),
    ] = None,
    force: Force = False,
) -> None:
    """Write a predicted step for other tools: Kineto JSON, or Chakra execution traces, a file a GPU."""
    from moesim.simulator.predict.step import run_step
    from moesim.simulator.scenario import load_scenario
    from moesim.simulator.trace.export import check_target, export_step

    check_target(output, form)
    if output.suffix:
        check_new(output, force)
    chosen = None if ranks is None else chosen_numbers("--ranks", ranks)
    with working(f"simulating {scenario}") as say:
        step = run_step(load_scenario(scenario, settings or ()))
        if ranks is not None and chosen is None:
            chosen = list(range(step.prepared.n_gpus))
        paths = export_step(step, output, form, chosen, say)
    say_written(str(paths[0]) if len(paths) == 1 else f"{len(paths)} files in {output}", _READERS[form])


_READERS = {
    "kineto": "for Holistic Trace Analysis, TraceLens and https://ui.perfetto.dev",
    "chakra": "for Chakra's feeder and the simulators that use it",
}


def _show_comparison(found: TraceComparison) -> None:
    one, two = found.measured, found.other
    print_text(
        f"{one.label}, rank {one.rank.raw.rank}, {one.step['name']}: {_ms(one.wall_ns)} ms. {two.label}: "
        f"{_ms(two.wall_ns)} ms. Gap {found.gap_ns / 1e6:+,.3f} ms."
    )
    rows = [
        (
            row["part"],
            row["kind"],
            _ms(row["measured_ns"]),
            _ms(row["other_ns"]),
            f"{row['difference_ns'] / 1e6:+,.3f}",
        )
        for row in found.bars
    ]
    whole = ("step", "", _ms(one.wall_ns), _ms(two.wall_ns), f"{found.gap_ns / 1e6:+,.3f}")
    print_table(("part", "kind", "measured ms", "other", "difference"), [*rows, whole], right=(2, 3, 4))
    for number, finding in enumerate(found.findings, 1):
        share = f" ({finding.ns / 1e6:+,.2f} ms)" if finding.ns else ""
        print_text(f"{number}. {finding.role.capitalize()}{share}: {finding.text} Check: {finding.check}.")
    for row in found.unpriced[:MOST_STEPS]:
        print_text(f"Not on the other side: {row['kernel'][:80]} ({row['class']}), {_ms(row['ns'])} ms")
    for note in found.notes:
        print_text(f"Note: {note}.")


def _show(trace: StepTrace) -> None:
    table = trace.table()
    for rank in table["ranks"]:
        _show_rank(rank)
    if len(table["ranks"]) > 1:
        _show_matched(trace)
    for note in table["notes"]:
        print_text(f"Note: {note}.")


def _ms(nanoseconds: int) -> str:
    return f"{nanoseconds / 1e6:,.3f}"


def _show_rank(rank: dict[str, Any]) -> None:
    print_text(
        f"Rank {rank['rank']} of {rank['source']}: {rank['events']:,} GPU events, "
        f"{rank['gpu'] or 'GPU not named'}"
    )
    print_text(
        f"Steps: {rank['how']['steps']}. Layers: {rank['how']['layers']}. Micro-batches: "
        f"{rank['how']['microbatches']}."
    )
    headers = ("step", "wall ms", "busy", "compute", "comm.", "exposed", "idle")
    keys = ("wall_ns", "busy_ns", "compute_ns", "communication_ns", "exposed_communication_ns", "idle_ns")
    rows = [(str(step["name"]), *(_ms(step[key]) for key in keys)) for step in rank["steps"][:MOST_STEPS]]
    print_table(
        headers,
        [*rows, ("whole trace", *(_ms(rank["whole"][key]) for key in keys))],
        right=(1, 2, 3, 4, 5, 6),
    )
    causes: dict[str, int] = {}
    for step in rank["steps"]:
        for cause, taken in step["idle_by_cause_ns"].items():
            causes[cause] = causes.get(cause, 0) + taken
    if causes:
        print_text(
            "Idle by cause, ms: "
            + ", ".join(f"{cause.replace('_', ' ')} {_ms(ns)}" for cause, ns in causes.items())
        )
    print_table(
        ("class", "ms", "events", "share", "phases, ms"),
        [
            (
                row["class"], _ms(row["ns"]), str(row["events"]), f"{row['share']:.1%}",
                " ".join(f"{phase} {_ms(ns)}" for phase, ns in row["phases_ns"].items()),
            )
            for row in rank["classes"]
        ],
        right=(1, 2, 3),
    )  # fmt: skip
    parts = rank["coverage"]
    print_text(
        f"In a class: {parts['classified']:.2%} of GPU time; not in our model: "
        f"{parts['not_in_model']:.2%} (fills and "
        f"memsets included); graph replays: {rank['graph_replay_events']} events."
    )
    if rank["communication"]:
        print_table(
            ("communication", "where", "events", "ms", "GB/s"),
            [
                (
                    row["class"], row["where"], str(row["events"]), _ms(row["ns"]),
                    f"{row['bytes_per_s'] / 1e9:.1f}" if row["bytes_per_s"] else "-",
                )
                for row in rank["communication"]
            ],
            right=(2, 3, 4),
        )  # fmt: skip


def _show_matched(trace: StepTrace) -> None:
    table: dict[tuple[str, int], list[int]] = {}
    for row in trace.matched:
        into = table.setdefault((row["class"], row["rank"]), [0, 0, 0])
        into[0] += 1
        into[1] += row["transfer_ns"]
        into[2] += row["waiting_ns"]
    print_table(
        ("matched", "rank", "events", "transfer ms", "waiting ms"),
        [
            (kind, str(rank), str(row[0]), _ms(row[1]), _ms(row[2]))
            for (kind, rank), row in sorted(table.items())
        ],
        right=(1, 2, 3, 4),
    )
