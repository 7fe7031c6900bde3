"""Tells the options of a launcher (torchrun, deepspeed, srun) from the program and its arguments."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath

from moesim.simulator.trainers.launch import Machine, Unknown
from moesim.simulator.trainers.reading import slurm
from moesim.simulator.trainers.reading.script_record import Command, ScriptRecord
from moesim.simulator.trainers.reading.unknowns import Unknowns, is_known

_PYTHON = re.compile(r"python[\d.]*|pypy3?")
_TORCH_MODULES = ("torch.distributed.run", "torch.distributed.launch")
_FLAGS = {
    "torchrun": {"standalone", "no_python", "run_path", "use_env", "enable_elastic"},
    "deepspeed": {
        "no_python", "no_local_rank", "no_ssh", "no_ssh_check", "force_multi", "save_pid",
        "bind_cores_to_rank", "elastic_training", "enable_elastic_training",
    },
    "accelerate": {
        "multi_gpu", "use_deepspeed", "use_fsdp", "use_megatron_lm", "cpu", "tpu", "same_network", "debug",
        "no_python", "quiet", "q", "use_xpu", "ipex", "multi_cpu", "no_tpu_cluster", "use_parallelism_config",
    },
}  # fmt: skip
"""The options of each launcher that take no value."""
_RUNNERS = frozenset(["uv", "coverage", "poetry", "conda", "pixi", "ray", "torchx"])
"""Programs that run another one without options that matter here."""
_OTHERS = frozenset(
    [
        "docker",
        "podman",
        "curl",
        "wget",
        "pip",
        "pip3",
        "srun",
        "sbatch",
        "salloc",
        "singularity",
        "apptainer",
        "aws",
        "gcloud",
        "rsync",
    ]
)
_FEW_FLAGS = 5
"""A program that is not known counts as a launch from this many flags on."""
_NODES = {"torchrun": ("nnodes",), "deepspeed": ("num_nodes",), "accelerate": ("num_machines",)}
_GPUS = {"torchrun": ("nproc_per_node",), "deepspeed": ("num_gpus",), "accelerate": ()}


@dataclass(slots=True)
class Started:
    """A program and its words, the launcher that starts it, and what that launcher's options say."""

    launcher: str | None
    program: str
    words: list[str]
    options: dict[str, str] = field(default_factory=dict)
    unread: list[str] = field(default_factory=list)
    is_guess: bool = False


def started(command: Command, unknowns: Unknowns) -> Started | None:
    """The program that a command starts, or None for a command that is no training program."""
    words = list(command.words)
    name = PurePosixPath(words[0]).name if is_known(words[0]) else words[0]
    if name in ("torchrun", "deepspeed", "ft_launcher"):
        return _launched("torchrun" if name == "ft_launcher" else name, words[1:])
    if name == "accelerate" and words[1:2] == ["launch"]:
        return _launched("accelerate", words[2:])
    if _PYTHON.fullmatch(name):
        return _python(words[1:])
    if unknowns.shown(words[0]).endswith((".py", ".sh", ".slurm", ".sub")):
        return Started(None, words[0], words[1:])
    if not is_known(words[0]) or name in _RUNNERS:
        for at, word in enumerate(words[1:], start=1):
            if re.fullmatch(
                r"(.*/)?(torchrun|deepspeed|accelerate|python[\d.]*)|.*\.py", unknowns.shown(word)
            ):
                inner = started(replace(command, words=tuple(words[at:])), unknowns)
                if inner is not None:
                    inner.unread = [*(text for text in words[:at] if not is_known(text)), *inner.unread]
                    return inner
    flags = sum(word.startswith("--") for word in words)
    if is_known(words[0]) and flags >= _FEW_FLAGS and name not in _OTHERS:
        return Started(None, words[0], words[1:], is_guess=True)
    return None


def _python(words: list[str]) -> Started | None:
    while words:
        word = words[0]
        if word == "-m" and len(words) > 1:
            if words[1] in _TORCH_MODULES:
                return _launched("torchrun", words[2:])
            if words[1] == "accelerate.commands.launch":
                return _launched("accelerate", words[2:])
            if words[1] in ("deepspeed", "deepspeed.launcher.runner"):
                return _launched("deepspeed", words[2:])
            return None if words[1] in _OTHERS else Started(None, words[1], words[2:])
        if word in ("-X", "-W") and len(words) > 1:
            words = words[2:]
        elif word == "-c":
            return None
        elif word.startswith("-"):
            words = words[1:]
        elif re.search(r"(^|/)torch/distributed/(run|launch)\.py$", word):
            return _launched("torchrun", words[1:])
        else:
            return Started(None, word, words[1:])
    return None


def _launched(launcher: str, words: list[str]) -> Started | None:
    options: dict[str, str] = {}
    unread: list[str] = []
    flags = _FLAGS[launcher]
    at = 0
    while at < len(words):
        word = words[at]
        if not word.startswith("-"):
            if not is_known(word) and not re.search(r"\.\w+$|/", word) and at + 1 < len(words):
                unread.append(word)
                at += 1
                continue
            break
        name, equals, value = word.lstrip("-").partition("=")
        name = name.replace("-", "_")
        if name in ("m", "module"):
            at += 1
            break
        if equals:
            options[name] = value
            at += 1
        elif name in flags:
            options[name] = ""
            at += 1
        else:
            options[name] = words[at + 1] if at + 1 < len(words) else ""
            at += 2
    if at >= len(words):
        return None
    program, rest = words[at], words[at + 1 :]
    if "no_python" in options and _PYTHON.fullmatch(PurePosixPath(program).name):
        inner = _python(rest)
        if inner is not None:
            program, rest = inner.program, inner.words
    return Started(launcher, program, rest, options, unread)


def machine_of(command: Command, program: Started, reading: ScriptRecord) -> Machine:
    """The nodes and GPUs of a node that launcher, wrappers and headers ask for; the innermost one counts."""
    unknowns = reading.unknowns
    nodes: list[tuple[str, str]] = []
    gpus: list[tuple[str, str]] = []
    launcher = program.launcher
    if launcher is not None:
        nodes += [(program.options[key], command.place) for key in _NODES[launcher] if key in program.options]
        gpus += [(program.options[key], command.place) for key in _GPUS[launcher] if key in program.options]
        total, count = program.options.get("num_processes", ""), program.options.get("num_machines", "1")
        if launcher == "accelerate" and total.isdigit() and count.isdigit() and int(count) and len(total) < 8:
            gpus.append((str(int(total) // int(count)), command.place))
        unread = program.unread
        if unread:
            reading.notes[
                f"{command.place}: the options {' '.join(map(unknowns.shown, unread))[:80]} of {launcher} "
                "are not known"
            ] = None
    elif program.unread:
        shown = " ".join(map(unknowns.shown, program.unread))[:80]
        reading.notes[f"{command.place}: the launcher {shown} is not known"] = None
    tasks: list[tuple[str, str]] = []
    headers = [(slurm.asked(slurm.header_words(text)), place) for text, place in reading.headers]
    wrappers = [(_wrapper(words), command.place) for words in reversed(command.wrappers)]
    for options, place in [*wrappers, *reversed(headers)]:
        if "nodes" in options:
            nodes.append((options["nodes"], place))
        per_node = slurm.gpus_of(options)
        if per_node is not None:
            gpus.append((per_node, place))
        if "ntasks-per-node" in options:
            tasks.append((options["ntasks-per-node"], place))
    if launcher is None:
        gpus += tasks
    if not nodes and launcher in ("torchrun", "deepspeed") and gpus and "hostfile" not in program.options:
        nodes.append(("1", f"{command.place}, where {launcher} starts one node by default"))
    places: dict[str, str] = {}
    return Machine(
        _chosen("nodes", nodes, reading, places), _chosen("gpus_per_node", gpus, reading, places), places
    )


def _wrapper(words: tuple[str, ...]) -> dict[str, str]:
    """What a wrapper such as srun or mpirun asks for."""
    name = PurePosixPath(words[0]).name if words else ""
    if name in ("srun", "salloc", "sbatch"):
        return slurm.asked(words[1:])
    found: dict[str, str] = {}
    if name in ("mpirun", "mpiexec"):
        for word, value in zip(words[1:], [*words[2:], ""], strict=True):
            if word.lstrip("-") in ("npernode", "ppn") or word == "-N":
                found["ntasks-per-node"] = value
            match = re.fullmatch(r"ppr:(\d+):node(:.*)?", value)
            if word.lstrip("-") == "map-by" and match:
                found["ntasks-per-node"] = match[1]
    return found


def _chosen(
    name: str, candidates: list[tuple[str, str]], reading: ScriptRecord, places: dict[str, str]
) -> int | Unknown | None:
    """The first known of several values; the others are noted where they differ."""
    numbers = [(slurm.whole_number(reading.unknowns.value(text), name), place) for text, place in candidates]
    if not numbers:
        return None
    known = [(number, place) for number, place in numbers if isinstance(number, int)]
    chosen, place = (known or numbers)[0]
    places[name] = place
    for other, elsewhere in numbers:
        if isinstance(other, int) and other != chosen:
            reading.notes[
                f"{name} is {chosen} at {place}, but {other} at {elsewhere}; the first is taken"
            ] = None
    if isinstance(chosen, int) and isinstance(numbers[0][0], Unknown):
        first = numbers[0][0]
        reading.notes[
            f"{name} is {first.text!r} at {numbers[0][1]}, which is not known; {chosen} at {place} is taken"
        ] = None
    return chosen
