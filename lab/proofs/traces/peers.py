"""Busy, compute, exposed and idle time by HTA and TraceLens beside ours, on the same files.

    python -m lab.proofs.traces.peers --hta PYTHON --tracelens PYTHON TREE --table FILE.md TRACE...

PYTHON is an interpreter with the peer's dependencies (`pip install holistictraceanalysis 'pandas<3'`, since
HTA 0.5.0 fails on pandas 3 where a trace has more than 32,767 events; for TraceLens pandas, tqdm, openpyxl, tabulate, orjson, PyYAML, matplotlib), TREE a checkout of AMD-AGI/TraceLens. Each peer
runs in its own process. HTA runs with HTA_DISABLE_NS_ROUNDING=1: by default it rounds every kernel inwards to
whole microseconds, which moves up to 2 us a kernel from busy to idle; the option is HTA's own.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

FIGURES = ("span", "busy", "idle", "exposed")
"""What is compared, in microseconds; `exposed` is communication beside no compute kernel."""
TOLERANCE = 1e-3


def hta_side(file: str) -> dict[str, Any]:
    """HTA's temporal breakdown of a file, and exposed communication by its own classes and merge."""
    from hta.trace_analysis import TraceAnalysis  # type: ignore[import-not-found]
    from hta.utils.utils import get_kernel_type, merge_kernel_intervals  # type: ignore[import-not-found]

    analysis = TraceAnalysis(trace_files={0: file}, include_last_profiler_step=True)
    row = analysis.get_temporal_breakdown(visualize=False).iloc[0]
    frame, symbols = analysis.t.get_trace(0), analysis.t.symbol_table.get_sym_table()
    kernels = frame[frame["stream"].ne(-1)].copy()
    kinds = kernels["name"].apply(lambda name: get_kernel_type(symbols[name]))

    def covered(*wanted: str) -> float:
        chosen = kernels[kinds.isin(wanted)].copy()
        merged = merge_kernel_intervals(chosen) if len(chosen) else None
        return 0.0 if merged is None else float((merged["end"] - merged["ts"]).sum())

    compute, talk = covered("COMPUTATION"), covered("COMMUNICATION")
    overlap = analysis.get_comm_comp_overlap(visualize=False) if talk and compute else None
    analysis.get_gpu_kernel_breakdown(visualize=False)
    return {
        "span": float(row["kernel_time(us)"]),
        "idle": float(row["idle_time(us)"]),
        "busy": float(row["kernel_time(us)"] - row["idle_time(us)"]),
        "compute": float(row["compute_time(us)"]),
        "communication": talk,
        "exposed": covered("COMPUTATION", "COMMUNICATION") - compute,
        "overlap_pctg": None if overlap is None else float(overlap["comp_comm_overlap_pctg"].iloc[0]),
        "kernels": len(kernels),
    }


def tracelens_side(file: str) -> dict[str, Any]:
    """The GPU timeline of TraceLens' report of a file."""
    from TraceLens.Reporting.generate_perf_report_pytorch import (  # type: ignore[import-not-found]
        generate_perf_report_pytorch,
    )

    with tempfile.TemporaryDirectory() as folder:
        generate_perf_report_pytorch(
            profile_json_path=file, output_csvs_dir=folder, include_unlinked_kernels=True
        )
        with (Path(folder) / "gpu_timeline.csv").open() as table:
            times = {row["type"]: float(row["time ms"]) * 1e3 for row in csv.DictReader(table)}
        sheets = sorted(path.stem for path in Path(folder).glob("*.csv"))
    return {
        "span": times["total_time"],
        "idle": times["idle_time"],
        "busy": times["busy_time"],
        "compute": times["computation_time"],
        "communication": times["total_comm_time"],
        "exposed": times["exposed_comm_time"],
        "exposed_memcpy": times["exposed_memcpy_time"],
        "sheets": sheets,
    }


def our_side(file: str) -> dict[str, Any]:
    """Our figures of the whole file; and by each peer's own rules of what is compute, applied to our tables.

    HTA leaves out what no call in the file launched where the file has several ProfilerSteps; to it,
    communication is `^nccl.*Kernel`, and copies and fills are no compute. To TraceLens communication is nccl,
    rccl and cross_device_reduce, and copies are no compute.
    """
    import moesim
    from moesim.simulator.trace.summary import times

    trace = moesim.trace(file)
    rank = trace.ranks[0]
    events, names = rank.events, rank.names
    start, end = int(events["start"].min()), int(events["end"].max())
    several = sum(name.startswith("ProfilerStep") for name in names) > 1
    launched = events["launch"] >= 0
    hta = _by_rules(events[launched] if several else events, names, r"^nccl.*Kernel", r"^Mem(cpy|set)|^dma")
    named = r"(?i)[rn]ccl|cross_device_reduce"
    tracelens = _by_rules(events, names, named, r"^MEMORY_COPY_|^__amd_rocclr_copyBuffer", by_activity=True)
    return {**_figures(times(events, start, end)), "events": len(events), "hta": hta, "tracelens": tracelens}


def _figures(row: dict[str, int]) -> dict[str, float]:
    return {
        "span": row["wall_ns"] / 1e3, "busy": row["busy_ns"] / 1e3, "idle": row["idle_ns"] / 1e3,
        "exposed": row["exposed_communication_ns"] / 1e3,
    }  # fmt: skip


def _by_rules(
    events: Any, names: list[str], talks: str, copies: str, by_activity: bool = False
) -> dict[str, float]:
    """Figures of our events under other classes: by the kernel's name, copies also by the kind of activity."""
    from moesim.simulator.trace import CLASSES
    from moesim.simulator.trace.summary import times

    chosen = events.copy()
    for number in set(chosen["name"].tolist()):
        own = chosen["name"] == number
        kind = (
            "memcpy_d2d" if re.search(copies, names[number]) else
            "other_communication" if re.search(talks, names[number]) else "elementwise"
        )  # fmt: skip
        chosen["cls"][own] = CLASSES.index(kind)
    if not by_activity:
        chosen["activity"] = 0
    return _figures(times(chosen, int(chosen["start"].min()), int(chosen["end"].max())))


SIDES = {"hta": hta_side, "tracelens": tracelens_side, "ours": our_side}


def run_side(side: str, python: str, file: Path, tree: str = "") -> dict[str, Any]:
    """The figures of one side, from a process of its own; {"error": text} where it fails."""
    environment = {**os.environ, "HTA_DISABLE_NS_ROUNDING": "1"}
    if tree:
        environment["PYTHONPATH"] = tree
    done = subprocess.run(
        [python, __file__, "--side", side, str(file)], env=environment, capture_output=True, text=True
    )
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return {"error": (done.stderr.strip().splitlines() or ["no output"])[-1][:200]}
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def rows_of(file: Path, sides: dict[str, dict[str, Any]]) -> tuple[list[str], int]:
    """Lines of the table for one trace, and how many figures differ under the peer's own rules."""
    ours, wrong, lines = sides["ours"], 0, []
    failed = [f"{name}: {found['error']}" for name, found in sides.items() if "error" in found]
    if failed:
        lines.append(f"| {file.name} | " + "; ".join(failed) + " |" + " |" * 5)
    for key in FIGURES if "error" not in ours else ():
        cells = [f"{ours[key]:,.3f}"]
        for name in ("hta", "tracelens"):
            found = sides.get(name, {})
            if key not in found:
                cells += ["", ""]
                continue
            same = ours[name][key]
            wrong += abs(found[key] - same) > TOLERANCE * same + 0.001
            cells += [f"{found[key]:,.3f} ({_apart(found[key], ours[key])})", _apart(found[key], same)]
        lines.append(f"| {file.name} | {key} | " + " | ".join(cells) + " |")
    return lines, wrong


def _apart(theirs: float, ours: float) -> str:
    if abs(theirs - ours) < 0.0015:
        return "0"
    return f"{(theirs / ours - 1) * 100:+.3f} %" if ours else "ours is 0"


def main() -> int:
    """Compare all files; the exit code is 1 where a figure is further apart than the tolerance."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--side", choices=SIDES)
    parser.add_argument("--hta", default="")
    parser.add_argument("--tracelens", nargs=2, metavar=("PYTHON", "TREE"))
    parser.add_argument("--table", type=Path)
    args = parser.parse_args()
    if args.side:
        print(json.dumps(SIDES[args.side](str(args.files[0]))))
        return 0
    lines = [
        "| trace | figure, us | ours | HTA (to ours) | under HTA's rules | TraceLens (to ours) | "
        "under TraceLens' rules |",
        "|---|---|---|---|---|---|---|",
    ]
    wrong = unread = 0
    for file in args.files:
        sides = {"ours": run_side("ours", sys.executable, file)}
        if args.hta:
            sides["hta"] = run_side("hta", args.hta, file)
        if args.tracelens:
            sides["tracelens"] = run_side("tracelens", args.tracelens[0], file, args.tracelens[1])
        more, far = rows_of(file, sides)
        print("\n".join(more), flush=True)
        lines += more
        wrong += far
        unread += sum("error" in found for found in sides.values())
    if args.table:
        args.table.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{wrong} figures are further apart than {TOLERANCE:.1%}; {unread} readings failed")
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
