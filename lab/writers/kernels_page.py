"""Writes docs/kernels.md and its figures from the rows of a calibration and of the kernel benchmark.

    pip install matplotlib
    python -m lab.writers.kernels_page

Tables need nothing but the rows; the figures need matplotlib. Nothing on the page is typed in.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lab import packed

ROOT = Path(__file__).resolve().parents[2]
ROWS = ROOT / "lab" / "results" / "2026-11-20-h200-8gpu.rows.jsonl.xz"
RESULTS = ROOT / "lab" / "results"
BENCH = RESULTS / "kernels-h200-x8-2026-11-20.json.xz"
BENCH4 = RESULTS / "kernels-h200-x4-2026-11-20.json.xz"
TURNS = RESULTS / "kernels-before-after-h200-x4-2026-11-20.json.xz"
SANITIZER = RESULTS / "sanitizer-h200-2026-11-23.json.xz"
PUSHES = RESULTS / "2026-11-22-h200-x2-link-pushes.json.xz"
ONCE = PUSHES.with_name("2026-11-23-h200-x2-dispatch-once.json.xz")
ROW_COSTS = PUSHES.with_name("2026-11-25-h100-x2-row-costs.json.xz")
FIGURES = ROOT / "docs" / "figures"
PAGE = ROOT / "docs" / "kernels.md"
NOTES = ROOT / "lab" / "docs" / "kernels-notes.md"

LINK_GB_S = 450.0
"""Nominal NVLink rate of an H200 per direction."""

Row = dict[str, Any]
Series = dict[float, float]


def read_rows(path: Path) -> tuple[dict[str, Any], list[Row]]:
    """Header and usable rows of a calibration."""
    lines = [json.loads(line) for line in packed.text(path).splitlines()]
    return lines[0]["header"], [row for row in lines[1:] if row.get("measurement") and not row.get("failed")]


def series(rows: Iterable[Row], measurement: str, x: str, **wanted: Any) -> Series:
    """GB/s of the rows of one measurement with the given parameters, by parameter `x`."""
    found: Series = {}
    for row in rows:
        p = row["parameters"]
        if row["measurement"] == measurement and all(p.get(k) == v for k, v in wanted.items()):
            found[p[x]] = row["values"]["bytes"] / row["seconds"] / 1e9
    return dict(sorted(found.items()))


def slow_downs(rows: list[Row]) -> dict[str, dict[int, float]]:
    """Time beside the copy over time alone, by operator (SM-aware: best count of free SMs) and copy SMs."""
    found: defaultdict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row["measurement"] == "interference":
            p = row["parameters"]
            name = f"{p['operator']}, SM-aware" if p["told"] else p["operator"]
            found[name][p["sms"]].append(row["values"]["ratio"])
    return {
        name: {sms: min(values) for sms, values in sorted(by.items())} for name, by in sorted(found.items())
    }


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    """Markdown table."""
    return [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *(f"| {' | '.join(r)} |" for r in rows)]


def rate_table(lines: dict[str, Series]) -> list[str]:
    """GB/s by number of SMs, one row a kernel."""
    sms = sorted({x for line in lines.values() for x in line})
    rows = [[name, *(f"{line[x]:.0f}" if x in line else "" for x in sms)] for name, line in lines.items()]
    return table(["GB/s", *(f"{x:g}" for x in sms)], rows)


def bench_times(path: Path, what: str, **wanted: Any) -> Series:
    """Microseconds of a kernel benchmark by number of SMs; the median where a row was measured again."""
    found: defaultdict[float, list[float]] = defaultdict(list)
    for row in json.loads(packed.text(path))["rows"]:
        if row["what"] == what and all(row.get(k) == v for k, v in wanted.items()):
            found[row["sms"]].append(row["median_us"])
    return {sms: statistics.median(values) for sms, values in sorted(found.items())}


def at(line: Series, sms: tuple[int, ...]) -> Series:
    """Only these numbers of SMs."""
    return {n: line[n] for n in sms if n in line}


def beside_deepep() -> list[str]:
    """Ours and DeepEP's times at 4 GPUs in one run, with notify where DeepEP's has one."""
    lines: dict[str, Series] = {}
    for name, what, payload in (
        ("dispatch FP8", "notify + dispatch", "fp8"),
        ("dispatch BF16", "notify + dispatch", "bf16"),
        ("combine BF16", "combine", "bf16"),
    ):
        theirs = bench_times(BENCH4, f"deepep {name.lower()}")
        lines[f"{name}, PTX"] = at(bench_times(BENCH4, what, payload=payload), (8, 20, 24))
        lines[f"{name}, CUDA C++"] = at(bench_times(BENCH4, f"{what} cuda", payload=payload), (8, 20, 24))
        lines[f"{name}, DeepEP v1.2.1"] = theirs
    return time_table(lines)


def row_costs(kernels: str, ranks: int, sms: int) -> list[str]:
    """Times of dispatch and combine by the width of a row and the choices of a token."""
    data = json.loads(packed.text(ROW_COSTS))
    rows = [dict(zip(data["columns"], row, strict=True)) for row in data["rows"]]
    widths = (1024, 2048, 3072, 4096, 5120, 6144, 7168)
    lines: dict[str, dict[int, list[float]]] = {}
    for row in rows:
        same = (row["kernels"], row["ranks"], row["sms"], row["tokens"]) == (kernels, ranks, sms, 4096)
        if same and row["routing"] in ("top-8", "top-1") and row["hidden"] in widths:
            name = f"{row['operation'].replace('bf', 'BF').replace('fp', 'FP')}, {row['routing']}"
            line = lines.setdefault(name, {})
            line.setdefault(row["hidden"], []).append(row["us"])
    shown = [[name, *(f"{min(line[w]):.0f}" for w in widths)] for name, line in sorted(lines.items())]
    return table([f"us, {ranks} ranks, {sms} SMs", *(f"{w:,}" for w in widths)], shown)


def over_nodes(nodes: str) -> list[str]:
    """Times over two hops and over one between the same ranks."""
    lines = {
        f"{hops} {direction} {payload.upper()}": bench_times(
            BENCH4, f"{hops} {direction}", nodes=nodes, payload=payload
        )
        for direction, payload in (("dispatch", "fp8"), ("dispatch", "bf16"), ("combine", "bf16"))
        for hops in ("two-hop", "one-hop")
    }
    if nodes == "2x2":
        for direction in ("dispatch", "combine"):
            name = (
                f"two-hop {direction} as a composition before, {'FP8' if direction == 'dispatch' else 'BF16'}"
            )
            lines[name] = bench_times(TURNS, f"two-hop {direction}", version="before")
    return time_table(lines)


def by_turns() -> list[str]:
    """Dispatch before it had roles and now, low-latency combine before and now, measured by turns."""
    lines: dict[str, Series] = {}
    for payload in ("fp8", "bf16"):
        for version in ("before", "now"):
            lines[f"dispatch {payload.upper()}, {version}"] = bench_times(
                TURNS, "notify + dispatch", version=version, payload=payload
            )
    return time_table(lines)


def few_tokens() -> list[str]:
    """Low latency at 4 GPUs: the combine before and now, the dispatch."""
    lines: dict[str, Series] = {}
    for tokens in (1, 32, 128, 256):
        lines[f"dispatch, {tokens} tokens"] = bench_times(BENCH4, "dispatch_ll", tokens=tokens)
        lines[f"combine, {tokens} tokens"] = bench_times(BENCH4, "combine_ll", tokens=tokens)
        lines[f"combine, {tokens} tokens, before"] = bench_times(
            TURNS, "combine_ll", tokens=tokens, version="before"
        )
    return time_table(lines)


def sanitized() -> list[str]:
    """What compute-sanitizer found."""
    found = json.loads(packed.text(SANITIZER))
    lines = [
        f"`{found['command']}` on one {found['gpu']}, {found['date']}, {found['tool'][0]}: all",
        f"{len(found['kernels_sha256'])} kernels and the CUDA C++ counterparts, several ranks on one GPU.",
        "",
    ]
    rows = [
        [
            item["tool"],
            {"every": "every kernel", "planted": "a store planted behind a buffer"}[item["work"]],
            str(item["errors"]),
            ", ".join(f"{k}: {v}" for k, v in item["by_kernel"].items()),
        ]
        for item in found["runs"]
    ]
    return lines + table(["tool", "over", "errors", "by kernel"], rows)


def mean_times(path: Path, kernel: str) -> dict[str, Series]:
    """Microseconds by SMs of each version of a kernel on two GPUs; of two turns the mean."""
    times: defaultdict[str, defaultdict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in json.loads(packed.text(path))["rows"]:
        name, _, version = row["what"].partition(" ")
        if name != kernel or "one_gpu" in row or "turn" not in row or not row.get("default", True):
            continue
        kind = {"fp8": "dispatch FP8", "bf16": "dispatch BF16"}.get(row.get("payload", ""), "combine")
        times[f"{kind}, {version}"][row["sms"]].append(row["us"])
    return {name: {n: statistics.fmean(v) for n, v in by.items()} for name, by in sorted(times.items())}


def over_sms() -> list[str]:
    """Combine before and now on two GPUs, by SMs."""
    return [
        f"As above, also on 2026-11-23 (`{PUSHES.relative_to(ROOT)}`),",
        "with `--seconds 40 --parts dispatch,combine,stamps,one_gpu` and `combine.ptx` of commit 499a7c35.",
        "",
        *time_table(mean_times(PUSHES, "combine")),
    ]


def loaded_once() -> list[str]:
    """Dispatch before and now on two GPUs, by SMs, and what an SM stores."""
    measured = json.loads(packed.text(ONCE))
    stores: defaultdict[str, Series] = defaultdict(dict)
    for row in measured["rows"]:
        _, _, name = row["what"].partition("engine ")
        if name and "load" not in name and row["both"] and (row["chunk"], row["warps"]) != (14336, 2):
            stores[name][row["sms"]] = row["gb_per_s"] / row["sms"]
    return [
        f"One run on {measured['date'][:10]}, two NVIDIA H200, driver 580.159.04, SM clock 1980 MHz,",
        f"limit 700 W (`{ONCE.relative_to(ROOT)}`), by",
        "`python -m lab.studies.link_pushes -o OUT.json --seconds 45 --before DIR",
        "--parts dispatch,engine,one_gpu,stamps`. DIR holds `dispatch.ptx` of commit e75fe9ac. Versions take",
        "turns, and the table has the mean of each version's two medians, notify included. `by copy engine`:",
        "no own rows, and beside it one copy of all the rank's rows in token order (receivers read another).",
        "",
        *time_table(mean_times(ONCE, "dispatch")),
        "",
        "What an SM stores when it loads nothing, both GPUs at work (store: bulk copies; both: by turns):",
        "",
        *table(
            ["GB/s an SM", *(f"{n:g}" for n in stores["store both"])],
            [[name, *(f"{rate:.1f}" for rate in line.values())] for name, line in stores.items()],
        ),
    ]


def time_table(lines: dict[str, Series]) -> list[str]:
    """Microseconds by number of SMs, one row a kernel."""
    sms = sorted({x for line in lines.values() for x in line})
    rows = [[name, *(f"{line[x]:.0f}" if x in line else "" for x in sms)] for name, line in lines.items()]
    return table(["us", *(f"{x:g}" for x in sms)], rows)


def draw(name: str, lines: dict[str, Series], x_label: str, y_label: str, limit: float | None = None) -> str:
    """An SVG line chart, the same bytes for the same data; returns the Markdown that shows it."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "moesim"
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7.0, 4.0))
    for (label, line), marker in zip(lines.items(), "osv^DPX*<>hp", strict=False):
        axes.plot(list(line), list(line.values()), marker=marker, markersize=4, linewidth=1.2, label=label)
    if limit is not None:
        axes.axhline(limit, color="black", linewidth=0.8, linestyle="--", label=f"nominal link {limit:g}")
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    FIGURES.mkdir(exist_ok=True)
    path = FIGURES / f"{name}.svg"
    figure.savefig(path, metadata={"Date": None}, bbox_inches="tight")
    plt.close(figure)
    return f"![{y_label} against {x_label}](figures/{path.name})"


def page(header: dict[str, Any], rows: list[Row]) -> str:
    """The whole page."""
    experts = {
        "dispatch FP8": series(rows, "all_to_all", "sms", operation="dispatch_fp8", tokens=4096, ranks=8),
        "combine BF16": series(rows, "all_to_all", "sms", operation="combine", tokens=4096, ranks=8),
        "all-to-all push": series(rows, "all_to_all", "sms", operation="push", tokens=4096, ranks=8),
    }
    size = 256 * 2**20
    copies = {
        variant: series(rows, "copy", "ctas", variant=variant, size_bytes=size, **threads)
        for variant, threads in (("push", {"threads": 1024}), ("pull", {"threads": 1024}), ("bulk", {}))
    }
    beside = slow_downs(rows)
    times = [
        [
            str(row["parameters"]["sms"]),
            row["parameters"]["operation"],
            str(row["parameters"]["tokens"]),
            f"{row['seconds'] * 1e6:.0f}",
            f"{(row['high_s'] - row['low_s']) / row['seconds']:.1%}",
        ]
        for row in rows
        if row["measurement"] == "all_to_all"
        and row["parameters"]["tokens"] == 4096
        and row["parameters"]["sms"] in (8, 16, 20, 24)
    ]
    clocks = statistics.median(r["values"]["sm_clock_hz"] for r in rows if "sm_clock_hz" in r["values"]) / 1e6
    languages = {
        f"{name}, {language}": bench_times(BENCH, f"{what}{suffix}", payload=payload)
        for name, what, payload in (
            ("dispatch FP8", "notify + dispatch", "fp8"),
            ("dispatch BF16", "notify + dispatch", "bf16"),
            ("combine", "combine", "bf16"),
        )
        for language, suffix in (("PTX", ""), ("CUDA C++", " cuda"))
    }
    lines = [
        "# The communication kernels, measured",
        "",
        "Generated by `python -m lab.writers.kernels_page` from",
        f"`{ROWS.relative_to(ROOT)}`: {header['machine']},",
        f"driver {header['driver']}, CUDA {header['cuda']}, median SM clock {clocks:.0f} MHz,",
        "NVLink multicast off, `moesim calibrate`. The top of each kernel's file in `kernels/ptx/` describes",
        "its layout, launch and memory model.",
        "",
        "## Dispatch and combine inside a node",
        "",
        "These figures have the dispatch before it had roles (below). 8 ranks have 4,096 tokens each, hidden",
        "7168, top-8 of 256 experts and random scores. Payload counts the rows of the own rank: 7/8 of it",
        "crosses NVLink, and all of it for the push.",
        "",
        *rate_table(experts),
        "",
        draw("expert-parallel", experts, "communication SMs", "GB/s", LINK_GB_S),
        "",
        *table(["SMs", "operation", "tokens", "time (us)", "spread"], times),
        "",
        "### PTX beside CUDA C++",
        "",
        f"Times are the median of nine on the slowest rank, notify included (`{BENCH.relative_to(ROOT)}`).",
        "The CUDA C++ versions have no inline PTX.",
        "",
        *time_table(languages),
        "",
        draw("ptx-cuda", languages, "communication SMs", "us"),
        "",
        "### Beside DeepEP, 4 GPUs, one run",
        "",
        "Times are the median of 15 (DeepEP 30) on the slowest of 4 ranks, otherwise as above",
        f"(`{BENCH4.relative_to(ROOT)}`). DeepEP's time is that of its best chunk size, tuned in",
        "the run; ours are the defaults. DeepEP was built from its tag with the machine's nvcc: intra-node",
        "kernels only, without NVSHMEM, aggressive PTX instructions on.",
        "",
        *beside_deepep(),
        "",
        "### What a row costs in DeepEP, 2 GPUs",
        "",
        "Two NVIDIA H100 80GB HBM3 on NVLink, driver 580.159.04, SM clock 1,980 MHz, NVLink multicast off,",
        f"2026-11-25 (`{ROW_COSTS.relative_to(ROOT)}`, which holds the commands, by",
        "`lab/benchmarks/row_costs.py` and `lab/benchmarks/our_row_costs.py`). 4,096 tokens a rank,",
        "random top-k of 256 experts, rows by their elements; the median of 15 on the slowest rank, notify",
        "included, L2 overwritten before each.",
        "",
        *row_costs("deepep", 2, 8),
        "",
        "Four and eight ranks share the two GPUs, each with SMs of its own:",
        "",
        *row_costs("deepep", 4, 8),
        "",
        *row_costs("deepep", 8, 8),
        "",
        "Our kernels on the same GPUs:",
        "",
        *row_costs("ours", 2, 8),
        "",
        "### Roles in dispatch, before and now, 4 GPUs",
        "",
        "Before, each warp loaded and stored its own rows; now a loading warp looks items up and fills one",
        "ring that sending warps empty. Measured by turns: before, now, before",
        f"(`{TURNS.relative_to(ROOT)}`).",
        "",
        *by_turns(),
        "",
        "### Dispatch that loads rows once, 2 GPUs, before and now",
        "",
        *loaded_once(),
        "",
        "### Combine over SMs, 2 GPUs, before and now",
        "",
        *over_sms(),
        "",
        "### Low latency, 4 GPUs",
        "",
        "`before`: the high-throughput combine on the low-latency buffers.",
        "",
        *few_tokens(),
        "",
        "With 8 GPUs and 128 tokens (2026-11-20, earlier run, combine as a composition):",
        "",
        *time_table({k: bench_times(BENCH, f"{k}_ll", tokens=128) for k in ("dispatch", "combine")}),
        "",
        "### Two hops over virtual nodes, 4 GPUs",
        "",
        "Times include the notify of dispatch, on the slowest rank. Two nodes of two GPUs:",
        "",
        *over_nodes("2x2"),
        "",
        "Four nodes of one GPU, where every row crosses a rail first and a relay serves only itself:",
        "",
        *over_nodes("4x1"),
        "",
        "### compute-sanitizer",
        "",
        *sanitized(),
        "",
        "## Copies to one peer",
        "",
        *rate_table(copies),
        "",
        draw("copies", copies, "SMs (CTAs of 1,024 threads)", "GB/s", LINK_GB_S),
        "",
        "## Compute beside communication",
        "",
        "The table is the time beside a push copy on n SMs over the time alone on all SMs. SM-aware",
        "operators leave at least those n SMs free; the best of n, n + 2 and n + 4 counts.",
        "",
        *table(
            ["operator", *(str(n) for n in sorted({n for by in beside.values() for n in by}))],
            [
                [
                    name,
                    *(
                        f"{by[n]:.2f}" if n in by else ""
                        for n in sorted({m for b in beside.values() for m in b})
                    ),
                ]
                for name, by in beside.items()
            ],
        ),
        "",
        draw("interference", {k: dict(v) for k, v in beside.items()}, "communication SMs", "slow-down"),
        "",
        NOTES.read_text("utf-8").strip() if NOTES.is_file() else "",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page(*read_rows(ROWS)), "utf-8")
    print(f"wrote {PAGE.name}")
