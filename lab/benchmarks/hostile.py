"""Links and uploads that ask for too much, one after the other: what the server says, its memory, its time.

    python -m lab.benchmarks.hostile [--quick] [--most-mb 400]

Visits everything in `hostile.yaml`, and uploads of `uploads()`, against a server of its own on 127.0.0.1.
Ends with exit code 1 where a page broke, an answer took longer than a job may, or the memory of the serving
process was above the limit after any of them. Jobs are processes of their own: `app/jobs.py` limits them.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from websockets.exceptions import ConnectionClosed

from lab.benchmarks.streamlit_client import Client
from moesim.app import server_command
from moesim.app import jobs
from moesim.app.pages import HOME
from moesim.hwmodels.yaml_io import parse_mapping

DATA = Path(__file__).with_name("hostile.yaml")
MOST_MB = 400.0
MOST_S = 3 * jobs.SHORT_S
BROKEN = "This page could not be drawn"


def links(quick: bool = False) -> Iterator[tuple[str, str, str]]:
    """(what it is, page, query string) of every hostile link."""
    rows = parse_mapping(f"rows:\n{DATA.read_text('utf-8')}", DATA.name)["rows"]
    for row in rows:
        if quick and not row.get("quick"):
            continue
        yield row["why"], row["page"], query(row)


def query(row: Mapping[str, Any]) -> str:
    """The query string of one row of the data."""
    texts = [str(text) for text in row["set"]]
    if "times" in row:
        texts = [texts[0].replace("{n}", str(n)) for n in range(row["times"])]
    if "digits" in row:
        texts = ["seed=" + "9" * row["digits"]]
    if "characters" in row:
        texts[0] += "x" * row["characters"]
    if "nested" in row:
        texts[0] += "[" * row["nested"] + "]" * row["nested"]
    if "faults" in row:
        texts[-1] = "faults=" + json.dumps([{"kind": "slow-gpu", "gpu": 1, "speed": 0.5}] * row["faults"])
    if "phases" in row:
        phases = [{"name": f"p{n}", "steps": 1, "sequences": 15360 + 128 * n} for n in range(row["phases"])]
        texts.append("run.phases=" + json.dumps(phases))
    parameters: dict[str, Any] = {"preset": row.get("preset", HOME), "set": texts}
    if "with" in row:
        parameters["with"] = [json.dumps([HOME, *row["with"]])]
    return urlencode(parameters, doseq=True)


def uploads(quick: bool = False) -> Iterator[tuple[str, str, str, str, bytes]]:
    """(what it is, page, uploader, file name, bytes) of every hostile upload."""
    scenario, model = "Open a scenario", "Use a model"
    profile = "Upload a profile"
    deep = b'{"a":' * 50_000 + b"1" + b"}" * 50_000
    yield "JSON 50,000 deep", "scenario", scenario, "deep.json", deep
    yield "a gzip bomb", "calibration", profile, "bomb.yaml.gz", gzip.compress(b"\0" * 100_000_000, 1)
    if quick:
        return
    yield "1 MB of one YAML list", "scenario", scenario, "list.yaml", b"a: [" + b"1," * 490_000 + b"1]"
    keys = json.dumps({f"k{n}": n for n in range(60_000)}).encode()
    yield "60,000 unknown keys", "scenario", scenario, "keys.json", keys
    config = {"model_type": "mixtral", "hidden_size": 10**15, "num_hidden_layers": 10**15}
    yield "a model of 10^15 layers", "scenario", model, "config.json", json.dumps(config).encode()
    text = "include: [" + ", ".join(["h800-trace"] * 2_000) + "]\nname: x\n"
    yield "a profile of 2,000 includes", "calibration", profile, "include.yaml", text.encode()
    points = ", ".join(f"[{n}, {n}.5]" for n in range(1, 40_000))
    yield (
        "a profile of one curve with 40,000 points",
        "calibration",
        profile,
        "long.yaml",
        (f"name: x\naccelerator: h800-sxm\ncurves:\n  - {{id: a, points: [{points}]}}\n".encode()),
    )


def memory_mb(pid: int, line: str = "VmRSS") -> float:
    """Memory of one process in MB; VmHWM is the most that it ever had."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.split(f"{line}:")[1].split()[0]) / 1e3


async def visit(base: str, pid: int, quick: bool) -> list[tuple[str, float, float, list[str]]]:
    """Everything in turn: (what it was, seconds, MB of the serving process after it, what the page said)."""
    found = []
    for why, page, text in links(quick):
        client, began = Client(base, page, text, limit_s=MOST_S), time.monotonic()
        said = await _said(client, client.open())
        found.append((why, time.monotonic() - began, memory_mb(pid), said))
    for why, page, label, name, data in uploads(quick):
        client, began = Client(base, page, limit_s=MOST_S), time.monotonic()
        await client.open()
        said = await _said(client, client.upload(label, name, data))
        found.append((why, time.monotonic() - began, memory_mb(pid), said))
    client, began = Client(base, "scenario", limit_s=MOST_S), time.monotonic()
    await client.open()
    count = 70 if quick else 100  # more than the server keeps of one session
    said = await _said(client, client.flood(count, b"a: 1\n" * 600_000, "Open a scenario"))
    why = f"{count} files of 3 MB that no widget names"
    found.append((why, time.monotonic() - began, memory_mb(pid), said))
    return found


async def _said(client: Client, work: Any) -> list[str]:
    try:
        await work
    except ConnectionClosed:
        client.errors.append("the server ended the connection: too much was sent at once")
    except Exception as error:  # whatever it is, it is printed and counted
        client.errors.append(f"{BROKEN}: {type(error).__name__}: {error}")
    await client.close()
    return client.errors


def main() -> None:
    """Run it against a server of its own."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--most-mb", type=float, default=MOST_MB)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="moesim-hostile-") as kept:
        os.environ["MOESIM_CACHE"] = kept
        port = server_command.chosen_port(0)
        with server_command.running(port) as process:
            if not server_command.wait_until_healthy(process, port):
                sys.exit("the server did not start")
            before = memory_mb(process.pid)
            rows = asyncio.run(visit(server_command.url(port), process.pid, options.quick))
            peak = memory_mb(process.pid, "VmHWM")
    for why, seconds, memory, said in rows:
        print(f"{why:56} {seconds:5.1f} s {memory:4.0f} MB  {(said or ['(drawn)'])[0][:110]}")
    broken = [why for why, _, _, said in rows if any(BROKEN in text for text in said)]
    most, slowest = max(row[2] for row in rows), max(row[1] for row in rows)
    print(
        f"{len(rows)} visits, {len(broken)} pages broken; serving process {before:.0f} MB before, at most "
        f"{most:.0f} MB after one, {peak:.0f} MB at its peak; slowest answer {slowest:.1f} s"
    )
    sys.exit(1 if broken or most > options.most_mb or slowest > MOST_S else 0)


if __name__ == "__main__":
    main()
