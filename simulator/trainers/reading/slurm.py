"""Reads the `#SBATCH` headers of a batch script and the options of srun, which ask for nodes and GPUs."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable

from moesim.simulator.trainers.launch import Unknown

_SHORT = {"N": "nodes", "n": "ntasks", "G": "gpus", "c": "cpus-per-task"}
ASKED = (
    "nodes",
    "ntasks-per-node",
    "gpus-per-node",
    "gres",
    "ntasks",
    "gpus",
    "gpus-per-task",
    "cpus-per-task",
)
"""The options that say something about the machine."""


def header_options(text: str, file: str) -> list[tuple[str, str]]:
    """The `#SBATCH` options of a batch script before its first command, each with its place."""
    options: list[tuple[str, str]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        stripped = line.strip()
        if stripped.startswith("#SBATCH"):
            options.append(
                (re.split(r"\s#", stripped[len("#SBATCH") :].strip())[0].strip(), f"{file}, line {number}")
            )
        elif stripped and not stripped.startswith("#"):
            break
    return options


def asked(options: Iterable[str]) -> dict[str, str]:
    """What the words of srun, sbatch or a header ask for, by the long name of each option."""
    words = list(options)
    found: dict[str, str] = {}
    for n, word in enumerate(words):
        following = words[n + 1] if n + 1 < len(words) else ""
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            if name in ASKED:
                found[name] = value if equals else following
        elif len(word) > 1 and word[0] == "-" and word[1] in _SHORT:
            found[_SHORT[word[1]]] = word[2:].removeprefix("=") or following
    return found


def header_words(text: str) -> list[str]:
    """The words of one header."""
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


def gpus_of(options: dict[str, str]) -> str | None:
    """The GPUs of a node that options ask for, or None where they do not say."""
    if "gpus-per-node" in options:
        return options["gpus-per-node"].rsplit(":", 1)[-1]
    match = re.search(r"gpu(?::[\w.-]+)?:([^,()]+)|gpu$", options.get("gres", ""))
    if match:
        return match[1] or "1"
    if options.get("nodes") == "1" and "gpus" in options:
        return options["gpus"].rsplit(":", 1)[-1]
    return None


def slurm_variables(options: dict[str, str]) -> dict[str, str]:
    """The variables that Slurm sets for a batch script with these options."""
    variables: dict[str, str] = {}
    nodes, tasks = options.get("nodes", ""), options.get("ntasks-per-node", "")
    if nodes.isdigit():
        variables |= {"SLURM_NNODES": nodes, "SLURM_JOB_NUM_NODES": nodes}
    if tasks.isdigit():
        variables["SLURM_NTASKS_PER_NODE"] = tasks
    if options.get("ntasks", "").isdigit():
        variables |= {"SLURM_NTASKS": options["ntasks"], "SLURM_NPROCS": options["ntasks"]}
    elif nodes.isdigit() and tasks.isdigit() and len(nodes + tasks) < 12:
        variables["SLURM_NTASKS"] = str(int(nodes) * int(tasks))
    if "gpus-per-node" in options:
        variables["SLURM_GPUS_PER_NODE"] = options["gpus-per-node"]
    if options.get("cpus-per-task", "").isdigit():
        variables["SLURM_CPUS_PER_TASK"] = options["cpus-per-task"]
    return variables


def whole_number(text: str | Unknown, what: str) -> int | Unknown:
    """A count of nodes or GPUs; text that is no whole number is an Unknown."""
    if isinstance(text, Unknown):
        return text
    if re.fullmatch(r"\d{1,7}", text):
        return int(text)
    return Unknown(text, f"{what} is not a whole number")
