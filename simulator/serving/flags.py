"""A plan as the command lines of inference engines, from data files (`data/serving/flags`).

A file has `program`, `arguments` (flag, value, `when`), for an options file `keys` by dotted path, what the
engine cannot do (`refused`), and `notes`. Conditions are those of `trainers.rules.holds` over the facts of a
pool; values name facts in braces, and shell variables as $NAME.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

from msgspec import Struct

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.files import write_atomically
from moesim.hwmodels.yaml_io import dump_mapping, parse_mapping
from moesim.simulator.scenario import Scenario
from moesim.simulator.serving.deployment import Deployment, deployments, published_formats
from moesim.simulator.trainers.rules import holds

FILES = {"vllm": "vllm.yaml", "sglang": "sglang.yaml", "trtllm": "trtllm.yaml"}
"""Data file by the first part of an engine's name (`vllm-0.19`)."""

VARIABLES = {
    "MODEL": "the checkpoint's path or name",
    "DRAFT_MODEL": "the draft model's path or name",
    "HEAD_ADDRESS": "address of the replica's first node",
    "NODE_RANK": "number of this node in the replica, from 0",
    "FIRST_RANK": "first data-parallel rank of this node",
    "OPTIONS": "path of the options file",
}
"""Shell variables that a user fills in, and what each holds."""


class EngineLaunch(Struct, frozen=True):
    """One pool's command: `words` with variables as $NAME, and the content of its options file."""

    role: str
    replicas: int
    words: tuple[str, ...]
    options: Mapping[str, Any] | None
    notes: tuple[str, ...] = ()

    def command(self, variables: Mapping[str, str]) -> list[str]:
        """Words with the variables filled in; raises KeyError for one that is missing."""
        return [_filled(word, variables) for word in self.words]

    def shell(self) -> str:
        """The command as shell text, a flag a line, after the variables that it needs."""
        needed = [name for name in VARIABLES if any(f"${name}" in word for word in self.words)]
        lines = [f"# {self.role}: {self.replicas} such servers", *(f"# {note}" for note in self.notes)]
        lines += [f': "${{{name}:?{VARIABLES[name]}}}"' for name in needed]
        text = " ".join(_quoted(word) for word in self.words)
        return "\n".join([*lines, text.replace(" --", " \\\n    --")]) + "\n"


class EngineFlags(Struct, frozen=True):
    """The launches of a plan, one a pool, and how they are joined."""

    engine: str
    launches: tuple[EngineLaunch, ...]
    router: str

    def texts(self) -> dict[str, str]:
        """Content by file name: a script a pool, and options files."""
        made = {}
        for one in self.launches:
            stem = "serve" if one.role == "both" else one.role
            made[f"{stem}.sh"] = f"#!/bin/sh\n# {self.engine}; {self.router}\n{one.shell()}"
            if one.options is not None:
                made[f"{stem}-options.yaml"] = dump_mapping(dict(one.options))
        return made

    def text(self) -> str:
        """All files with their names."""
        return "\n".join(f"## {name}\n{text}" for name, text in self.texts().items())

    def write(self, folder: Path) -> list[Path]:
        """Write the files; raises InputError where that fails."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            raise InputError(f"{folder}: cannot be made: {problem.strerror or problem}") from None
        paths = []
        for name, text in self.texts().items():
            write_atomically(folder / name, [text])
            paths.append(folder / name)
        return paths


@lru_cache(maxsize=8)
def _rules(engine: str) -> dict[str, Any]:
    name = engine.split("-")[0]
    if name not in FILES:
        raise InputError(
            f"serving.engine={engine!r} has no command line that anybody else can start; set serving.engine "
            f"to a release of one of {', '.join(FILES)}"
        )
    path = resources.files("moesim.simulator") / "data" / "serving" / "flags" / FILES[name]
    return parse_mapping(path.read_text("utf-8"), FILES[name])


def facts(one: Deployment) -> dict[str, Any]:
    """What conditions and values of the files may name; numbers are those of one replica."""
    pool, serving, shape = one.pool, one.serving, one.shape
    group, node = pool.tp * pool.dp, one.cluster.node.n_gpus
    nodes = -(-pool.gpus // node)
    experts = shape.moe.experts if shape.moe else 0
    return {
        **{key: value for key, value in pool.model_dump().items() if key != "prefill"},
        "graph_prefill_tokens": pool.graph_prefill_tokens or 0,
        "group": group,
        "gpus": pool.gpus,
        "nodes": nodes,
        "dp_a_node": max(pool.dp // nodes, 1),
        "ep_is_group": pool.ep in (1, group),
        "exchange": one.exchange if shape.moe and pool.dp > 1 else "none",
        "moe": shape.moe is not None,
        "slots": experts + pool.redundant_experts,
        "all_seqs": pool.max_num_seqs * pool.dp,
        "all_tokens": pool.max_num_batched_tokens * pool.dp,
        "checked_tokens": pool.draft_tokens + 1,
        "mtp": shape.mtp_layers > 0,
        "published": published_formats(shape).linear,
        "weights": serving.weights,
        "cache": serving.cache,
        "prefix_caching": serving.prefix_caching,
        "chunked": one.engine.chunked,
        "buffer_tokens": max(serving.load.input_tokens, pool.max_num_batched_tokens),
        "role": one.role,
    }


def serving_flags(scenario: Scenario) -> EngineFlags:
    """The command lines of a scenario's pools for its engine.

    Raises InputError for what cannot be served as stated, and for what the engine cannot do.
    """
    pools = deployments(scenario)
    serving = pools[0].serving
    rules = _rules(serving.engine)
    replicas = {"replicas": pools[0].pool.replicas, "prefill_replicas": pools[-1].pool.replicas}
    launches = tuple(_launch(one, rules) for one in pools)
    router = rules["split_router"] if len(pools) > 1 else rules["router"]
    return EngineFlags(f"{rules['title']} ({serving.engine})", launches, router.format(**replicas))


def _launch(one: Deployment, rules: Mapping[str, Any]) -> EngineLaunch:
    known = facts(one)
    reasons = [row["because"] for row in rules["refused"] if _applies(row, known)]
    if reasons:
        raise InputError(f"{rules['title']} cannot serve this plan: {'; '.join(reasons)}; change the key")
    words = list(rules["program"])
    for row in rules["arguments"]:
        if _applies(row, known):
            words.append(row["flag"])
            if "value" in row:
                value = _value(row["value"], known)
                words.append(json.dumps(value) if isinstance(value, Mapping) else str(value))
    options: dict[str, Any] | None = {} if "keys" in rules else None
    for row in rules.get("keys", ()):
        if options is not None and _applies(row, known):
            _put(options, row["flag"].split("."), _value(row["value"], known))
    notes = tuple(row["text"].format(**known) for row in rules["notes"] if _applies(row, known))
    return EngineLaunch(one.role, one.pool.replicas, tuple(words), options, notes)


def _applies(row: Mapping[str, Any], known: Mapping[str, Any]) -> bool:
    return all(holds(condition, known[name]) for name, condition in row.get("when", {}).items())


def _value(value: Any, known: Mapping[str, Any]) -> Any:
    """A value of a file with its facts; one that is a fact alone keeps its type."""
    if isinstance(value, Mapping):
        return {key: _value(inner, known) for key, inner in value.items()}
    if not isinstance(value, str) or "{" not in value:
        return value
    name = value[1:-1]
    return known[name] if value == f"{{{name}}}" and name in known else value.format(**known)


def _put(into: dict[str, Any], path: list[str], value: Any) -> None:
    for key in path[:-1]:
        into = into.setdefault(key, {})
    into[path[-1]] = value


def _filled(word: str, variables: Mapping[str, str]) -> str:
    for name in VARIABLES:
        if f"${name}" in word:
            word = word.replace(f"${name}", variables[name])
    return word


def _quoted(word: str) -> str:
    """A word of a shell line; variables stay variables."""
    if "$" not in word:
        return shlex.quote(word)
    text = word.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text}"'
