"""Writes docs/kernels.md, its figures and lab/docs/kernels-tables.md from the rows of a calibration and of
the kernel benchmark.

    pip install matplotlib
    python -m lab.writers.kernels_page

Tables need nothing but the rows; the figures need matplotlib. Nothing on the page is typed in.
"""

from __future__ import annotations

import json
import statistics
import textwrap
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
SANITIZER = RESULTS / "sanitizer-h200-2026-11-23.json.xz"
PUSHES = RESULTS / "2026-11-22-h200-x2-link-pushes.json.xz"
ONCE = PUSHES.with_name("2026-11-23-h200-x2-dispatch-once.json.xz")
ROW_COSTS = PUSHES.with_name("2026-11-25-h100-x2-row-costs.json.xz")
FIGURES = ROOT / "docs" / "figures"
PAGE = ROOT / "docs" / "kernels.md"
TABLES = ROOT / "lab" / "docs" / "kernels-tables.md"

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


def slow_downs(rows: list[Row]) -> dict[str, Series]:
    """Time beside the copy over time alone, by operator (SM-aware: best count of free SMs) and copy SMs."""
    found: defaultdict[str, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
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


def beside_deepep() -> dict[str, Series]:
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
    return lines


def row_costs(ranks: int, sms: int) -> list[str]:
    """Times of DeepEP's and our dispatch and combine by the width of a row and the choices of a token."""
    data = json.loads(packed.text(ROW_COSTS))
    rows = [dict(zip(data["columns"], row, strict=True)) for row in data["rows"]]
    widths = (1024, 2048, 3072, 4096, 5120, 6144, 7168)
    kernels, routings = {"deepep": "DeepEP", "ours": "PTX"}, ("top-8", "top-1")
    lines: defaultdict[str, defaultdict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        same = (row["ranks"], row["sms"], row["tokens"]) == (ranks, sms, 4096)
        if same and row["kernels"] in kernels and row["routing"] in routings and row["hidden"] in widths:
            name = row["operation"].replace("bf", "BF").replace("fp", "FP")
            lines[f"{name}, {row['routing']}, {kernels[row['kernels']]}"][row["hidden"]].append(row["us"])
    shown = [[name, *(f"{min(line[w]):.0f}" for w in widths)] for name, line in sorted(lines.items())]
    return table([f"us, {ranks} ranks, {sms} SMs", *(f"{w:,}" for w in widths)], shown)


def over_nodes(nodes: str) -> dict[str, Series]:
    """Times over two hops and over one between the same ranks."""
    return {
        f"{hops} {direction} {payload.upper()}": bench_times(
            BENCH4, f"{hops} {direction}", nodes=nodes, payload=payload
        )
        for direction, payload in (("dispatch", "fp8"), ("dispatch", "bf16"), ("combine", "bf16"))
        for hops in ("two-hop", "one-hop")
    }


def few_tokens() -> dict[str, Series]:
    """Low latency at 4 GPUs."""
    return {
        f"{name}, {tokens} token{'s' * (tokens > 1)}": bench_times(BENCH4, f"{name}_ll", tokens=tokens)
        for tokens in (1, 32, 128, 256)
        for name in ("dispatch", "combine")
    }


def sanitized() -> list[str]:
    """What compute-sanitizer found."""
    found = json.loads(packed.text(SANITIZER))
    lines = [
        f"`{found['command'].replace('python benchmarks/sanitize.py', 'python -m lab.benchmarks.sanitize')}` on one {found['gpu']}, {found['date']}, {found['tool'][0]}: all",
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


def current_times() -> dict[str, Series]:
    """Today's dispatch and combine on two GPUs, by SMs."""
    times = mean_times(ONCE, "dispatch") | mean_times(PUSHES, "combine")
    return {
        name.replace(", now without", ", without").replace(", now", ""): line
        for name, line in times.items()
        if not name.endswith(("before", "by copy engine"))
    }


def stores_per_sm() -> Series:
    """GB/s that an SM stores to both GPUs by turns, by bulk copies, when it loads nothing."""
    found: Series = {}
    for row in json.loads(packed.text(ONCE))["rows"]:
        if (
            row["what"].endswith("engine store both")
            and row["both"]
            and (row["chunk"], row["warps"]) != (14336, 2)
        ):
            found[row["sms"]] = row["gb_per_s"] / row["sms"]
    return found


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


def over(slow: Series, fast: Series, *sms: float) -> str:
    """How many times as long the first takes as the second, by SMs: "1.39, 1.20 and 1.10"."""
    *first, last = (f"{slow[n] / fast[n]:.2f}" for n in sms)
    return f"{', '.join(first)} and {last}" if first else last


def shares(line: Series, few: float, many: float) -> str:
    """Time with few SMs over that with many."""
    return f"{line[few] / line[many]:.2f}"


def wrapped(text: str, indent: str = "") -> list[str]:
    """Lines of a paragraph, or of an item of a list."""
    return textwrap.wrap(" ".join(text.split()), 110, subsequent_indent=indent, break_on_hyphens=False)


def conclusions(
    now: dict[str, Series], eight: dict[str, Series], deepep: dict[str, Series], hops: dict[str, Series]
) -> list[str]:
    """What the tables show; every figure is computed from them."""
    fp8, bf16, low = now["dispatch FP8"], now["dispatch BF16"], few_tokens()
    no_fp8, no_bf16 = now["dispatch FP8, without own rows"], now["dispatch BF16, without own rows"]
    theirs = {
        name: over(deepep[f"{name}, DeepEP v1.2.1"], deepep[f"{name}, PTX"], 8, 20, 24)
        for name in ("dispatch FP8", "dispatch BF16", "combine BF16")
    }
    items = f"""
    **More SMs hardly ever cost time.** CTAs claim batches of tokens from one counter, so they end together.
    With 32 SMs dispatch takes {fp8[32] / min(fp8.values()):.2f} (FP8) and {bf16[32] / min(bf16.values()):.2f}
    (BF16) times its best time.

    **An SM's stores bound dispatch.** With 8 SMs at work, each stores {stores_per_sm()[8]:.0f} GB/s.
    Dispatch with 8 SMs takes {shares(fp8, 8, 16)} (FP8) and {shares(bf16, 8, 16)} (BF16) times the time of
    16; without own rows (`dispatch(..., own=False)`) {shares(no_fp8, 8, 16)} and {shares(no_bf16, 8, 16)}.
    Combine takes {shares(now["combine"], 8, 16)}.

    **PTX saves SMs in combine.** CUDA C++ takes
    {over(eight["combine, CUDA C++"], eight["combine, PTX"], 8, 20)} times as long with 8 and 20 SMs. In PTX
    some warps read peers by bulk copies while others add. In dispatch both are equal.

    **DeepEP** v1.2.1 with 8, 20 and 24 SMs takes {theirs["dispatch FP8"]} times our time in FP8 dispatch,
    {theirs["dispatch BF16"]} in BF16 dispatch, and {theirs["combine BF16"]} in combine.

    **A second hop** over two nodes of two GPUs takes, with 20 SMs,
    {over(hops["two-hop dispatch FP8"], hops["one-hop dispatch FP8"], 20)} times one hop in FP8 dispatch and
    {over(hops["two-hop combine BF16"], hops["one-hop combine BF16"], 20)} times in combine.

    **Low latency.** With 32 SMs, 128 tokens take {low["dispatch, 128 tokens"][32]:.0f} us to dispatch and
    {low["combine, 128 tokens"][32]:.0f} us to combine.

    **Rows.** DeepEP's SMs spend most of their time on tokens and not on bytes. Eq. X22 of
    [chapter 5](model/05-transfers.md) is the law that follows from these times and those of 4 and 8 ranks.

    **An SM-aware GEMM** that leaves exactly as many SMs free as a copy of two-CTA clusters takes can lose
    more than one that leaves two more, because the clusters of both do not tile the die
    ([decision 0009](decisions/0009-two-interference-measurements.md)).
    """
    return [line for item in items.split("\n\n") for line in wrapped(f"- {item}", "  ")]


LIMITS = """
- Eight GPUs were measured with an earlier dispatch (2026-11-20), and today's dispatch and combine on two
  GPUs. Profiles keep the times of the kernels that they were measured with; their kernel hash says so.
- Two hops over 2x4 and 4x2 GPUs were not measured.
"""

RACES = """
racecheck reports loads into a stage that lanes had read before `bar.warp.sync`, and one lane's mbarrier
arrival, across which it does not carry the other lanes' reads. The check lists these reports and fails on
any other.
"""


def all_to_all(rows: list[Row]) -> dict[str, Series]:
    """GB/s of dispatch, combine and push on 8 GPUs."""
    return {
        name: series(rows, "all_to_all", "sms", operation=operation, tokens=4096, ranks=8)
        for name, operation in (
            ("dispatch FP8", "dispatch_fp8"),
            ("combine BF16", "combine"),
            ("all-to-all push", "push"),
        )
    }


def in_both_languages() -> dict[str, Series]:
    """Microseconds of the PTX kernels and of their CUDA C++ counterparts on 8 GPUs."""
    return {
        f"{name}, {language}": bench_times(BENCH, f"{what}{suffix}", payload=payload)
        for name, what, payload in (
            ("dispatch FP8", "notify + dispatch", "fp8"),
            ("dispatch BF16", "notify + dispatch", "bf16"),
            ("combine", "combine", "bf16"),
        )
        for language, suffix in (("PTX", ""), ("CUDA C++", " cuda"))
    }


def copies_to_one_peer(rows: list[Row]) -> dict[str, Series]:
    """GB/s of 256 MiB by number of CTAs."""
    return {
        variant: series(rows, "copy", "ctas", variant=variant, size_bytes=256 * 2**20, **threads)
        for variant, threads in (("push", {"threads": 1024}), ("pull", {"threads": 1024}), ("bulk", {}))
    }


def slow_down_table(beside: dict[str, Series]) -> list[str]:
    """Time beside the copy over time alone, by SMs."""
    sms = sorted({n for by in beside.values() for n in by})
    rows = [[name, *(f"{by[n]:.2f}" if n in by else "" for n in sms)] for name, by in beside.items()]
    return table(["operator", *(str(n) for n in sms)], rows)


def machine(header: dict[str, Any], rows: list[Row]) -> list[str]:
    """What the tables were measured on, and what a time is."""
    clocks = statistics.median(r["values"]["sm_clock_hz"] for r in rows if "sm_clock_hz" in r["values"]) / 1e6
    return wrapped(
        f"""Generated by `python -m lab.writers.kernels_page` from `{ROWS.relative_to(ROOT)}`:
        {header["machine"]}, driver {header["driver"]}, CUDA {header["cuda"]}, median SM clock {clocks:.0f}
        MHz, NVLink multicast off, `moesim calibrate`, unless a section says otherwise. Times are medians on
        the slowest rank by number of communication SMs, notify of dispatch included."""
    )


def joined(parts: list[str | list[str]]) -> str:
    """A page of paragraphs."""
    return "\n\n".join(part if isinstance(part, str) else "\n".join(part) for part in parts) + "\n"


def page(header: dict[str, Any], rows: list[Row]) -> str:
    """The page for users."""
    experts, languages, now = all_to_all(rows), in_both_languages(), current_times()
    return joined(
        [
            "# The communication kernels, measured",
            machine(header, rows),
            wrapped(
                f"""The top of each kernel's file in `kernels/ptx/` describes its layout, launch and memory
                model. [{TABLES.relative_to(ROOT)}](../{TABLES.relative_to(ROOT)}) has the other tables: CUDA
                C++, DeepEP, widths of a row, low latency, two hops, copies, interference, sanitizer."""
            ),
            "## What the tables show",
            conclusions(now, languages, beside_deepep(), over_nodes("2x2")),
            "## Today's dispatch and combine, 2 GPUs",
            wrapped(
                f"""Two NVIDIA H200, driver 580.159.04, SM clock 1980 MHz, 4,096 tokens of 7168, top-8 of 256
                experts, 2026-11-23 (`{ONCE.relative_to(ROOT)}`, `{PUSHES.name}`)."""
            ),
            time_table(now),
            "## Dispatch and combine, 8 GPUs",
            wrapped(
                """8 ranks have 4,096 tokens each, hidden 7168, top-8 of 256 experts and random scores.
                Payload counts the rows of the own rank: 7/8 of it crosses NVLink, and all of it for the
                push."""
            ),
            draw("expert-parallel", experts, "communication SMs", "GB/s", LINK_GB_S),
            "PTX beside CUDA C++:",
            draw("ptx-cuda", languages, "communication SMs", "us"),
            "## Copies to one peer",
            draw("copies", copies_to_one_peer(rows), "SMs (CTAs of 1,024 threads)", "GB/s", LINK_GB_S),
            "## Compute beside communication",
            "The time beside a push copy on n SMs over the time alone on all SMs:",
            draw("interference", slow_downs(rows), "communication SMs", "slow-down"),
            "## Limits",
            LIMITS.strip(),
        ]
    )


def tables(header: dict[str, Any], rows: list[Row]) -> str:
    """The tables behind the page."""
    return joined(
        [
            "# Tables of the communication kernels",
            machine(header, rows),
            "## PTX beside CUDA C++, 8 GPUs",
            wrapped(
                f"Medians of nine (`{BENCH.relative_to(ROOT)}`). The CUDA C++ versions have no inline PTX."
            ),
            time_table(in_both_languages()),
            "## Dispatch and combine, 8 GPUs",
            rate_table(all_to_all(rows)),
            "## Beside DeepEP, 4 GPUs, one run",
            wrapped(
                f"""Medians of 15, DeepEP 30 (`{BENCH4.relative_to(ROOT)}`). DeepEP has its best chunk size,
                tuned in the run, intra-node kernels only and aggressive PTX instructions on; ours have the
                defaults."""
            ),
            time_table(beside_deepep()),
            "## What a row costs, 2 GPUs",
            wrapped(
                f"""Two NVIDIA H100 80GB HBM3, driver 580.159.04, SM clock 1,980 MHz, 2026-11-25
                (`{ROW_COSTS.relative_to(ROOT)}`, which holds the commands and the times with 4 and 8 ranks).
                4,096 tokens a rank, random top-k of 256 experts, rows by their elements, DeepEP v1.2.1, L2
                overwritten before each call."""
            ),
            row_costs(2, 8),
            "## Low latency, 4 GPUs",
            time_table(few_tokens()),
            "## Two hops over two nodes of two GPUs",
            time_table(over_nodes("2x2")),
            "## Copies to one peer",
            rate_table(copies_to_one_peer(rows)),
            "## Compute beside communication",
            wrapped(
                """The table is the time beside a push copy on n SMs over the time alone on all SMs. SM-aware
                operators leave at least those n SMs free; the best of n, n + 2 and n + 4 counts."""
            ),
            slow_down_table(slow_downs(rows)),
            "## compute-sanitizer",
            sanitized(),
            RACES.strip(),
        ]
    )


if __name__ == "__main__":
    header_and_rows = read_rows(ROWS)
    PAGE.write_text(page(*header_and_rows), "utf-8")
    TABLES.write_text(tables(*header_and_rows), "utf-8")
    print(f"wrote {PAGE.name} and {TABLES.name}")
