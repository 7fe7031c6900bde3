"""The command line: every command with any of its options, in this process."""

from __future__ import annotations

import io
import os
import random
import shutil
from contextlib import redirect_stderr, redirect_stdout
from functools import lru_cache
from pathlib import Path
from typing import Any

import typer
from fuzz_base import File, ReachedError, described, only_checked, texts_of
from fuzz_files import count_texts, log_texts, nccl_texts, script_texts, topology_texts
from fuzz_links import override
from fuzz_mutator import NUMBERS, TEXTS, Mutator

from moesim import cli
from moesim.hwmodels.errors import InputError

_LEFT_OUT = ("app", "doctor")
"""Commands that start a server, or read no input."""
_WORDS = {
    "scenario": ("deepseek-v3-2048xh800", "deepseek-v3-trace-pair"), "name": ("1f1b", "dualpipe",
    "deepseek-v3", "h800-sxm", "h100-1024"),
    "like": ("hgx-h200",), "network": ("mrft-ib-400g",), "node": ("hgx-h800",), "profile": ("h800-published",
    "h200-1gpu"),
    "target": ("h800-sxm",), "accelerator": ("h200-sxm", "h800-sxm"), "nic": ("400 Gb/s", "50 GB/s"),
    "dtype": ("FP8", "BF16"),
    "objective": ("time", "cost", "pareto"), "design": ("grid", "list", "random", "sobol"),
    "policy": ("global", "hierarchical"),
    "resolution": ("folded", "full"), "format_": ("text", "json", "csv"), "what": ("scenario", "result"),
    "arguments": ("megatron",),
    "vary": ("parallel.ep=8,16", "communication.sms=8..24:4"), "ranges": ("routing.expert_load_cv=0.1,0.3",),
    "ranks": ("8", "0,1"),
    "variants": ("parallel.ep=32",), "operation": ("all_gather",), "base": ("deepseek-v3-2048xh800",),
    "into": ("h200-1gpu",),
    "source": ("h200-sxm",), "members": ("all", "0,1"), "gpus": ("0-3",), "only": ("nccl",),
    "compare": ("h200-1gpu",),
    "scheduler": ("not an address",), "scenarios": ("deepseek-v3-2048xh800",),
}  # fmt: skip


@lru_cache(maxsize=1)
def _commands() -> tuple[tuple[tuple[str, ...], tuple[Any, ...]], ...]:
    """((words of the command), its parameters) of every command."""
    found = []

    def walk(group: Any, words: tuple[str, ...]) -> None:
        for name, command in group.commands.items():
            if hasattr(command, "commands"):
                walk(command, (*words, name))
            elif name not in _LEFT_OUT:
                found.append(((*words, name), tuple(command.params)))

    walk(typer.main.get_command(cli.app), ())
    return tuple(found)


def _word(m: Mutator, name: str, files: list[File]) -> str:
    r = m.rng
    if name in ("overrides",):
        return override(m)
    if name in ("trace", "picture", "store", "output", "trace_per_rank"):
        return (
            r.choice(("out.yaml", "out.json", "out.sqlite", "out.svg", "no/x.yaml", ".", ""))
            if r.random() < 0.9
            else str(m.value("a.yaml"))
        )
    if name in ("file", "log", "logs", "script", "config", "space") or (
        name == "scenario" and r.random() < 0.2
    ):
        makers = {
            "file": r.choice((texts_of(".txt", topology_texts), texts_of(".csv", count_texts))),
            "log": texts_of(".txt", nccl_texts),
            "logs": texts_of(".txt", log_texts), "script": texts_of(".sh", script_texts),
            "config": described("tests/golden/models", ".json", "*.json"),
            "space": texts_of(".yaml", lambda: ("ep: [8, 16]\npp: 2..8:x2\n",)),
            "scenario": described("simulator/data/scenarios"),
        }  # fmt: skip
        files.append(makers[name](m))
        return f"input-{len(files) - 1}{files[-1].name}"
    known = _WORDS.get(name)
    if known and r.random() < 0.7:
        return r.choice(known) if r.random() < 0.8 else str(m._near(r.choice(known)))
    return str(r.choice((r.randrange(20), 8, 16, m.value(8), r.choice(NUMBERS), r.choice(TEXTS))))[:6000]


def command_line(m: Mutator) -> tuple[list[str], list[File]]:
    r = m.rng
    words, parameters = r.choice(_commands())
    args, files = list(words), list[File]()
    for parameter in parameters:
        if parameter.name == "help":
            continue
        needed = parameter.required or parameter.param_type_name == "argument"
        if not needed and r.random() < 0.65:
            continue
        if needed and r.random() < 0.03:
            continue
        times = r.choice((1, 2)) if getattr(parameter, "multiple", False) or parameter.nargs == -1 else 1
        for _ in range(times):
            if parameter.param_type_name == "argument":
                args.append(_word(m, parameter.name, files))
            elif getattr(parameter, "is_flag", False):
                args.append(parameter.opts[0])
            else:
                args += [r.choice(parameter.opts), _word(m, parameter.name, files)]
    if r.random() < 0.03:
        args.insert(r.randrange(len(args) + 1), str(m.value("--json")))
    return args, files


def run_command(case: tuple[list[str], list[File]], folder: Path, rng: random.Random) -> None:
    args, files = case
    if args[0] == "validate" and not any(
        word.startswith("-") and word not in ("--json", "--all") for word in args[1:]
    ):
        return  # all published figures anew: no input of a stranger's
    here = Path.cwd()
    os.chdir(folder)
    try:
        for number, file in enumerate(files):
            Path(f"input-{number}{file.name}").write_bytes(file.data)
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()), only_checked():
            cli.root.commands()(args=args, prog_name="moesim")
    except ReachedError:
        pass
    except SystemExit as end:
        if end.code not in (None, 0, 2, 3):
            raise RuntimeError(f"exit code {end.code}") from end
        if end.code in (2, 3):
            raise InputError("usage") from None
    finally:
        os.chdir(here)
        for path in folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
