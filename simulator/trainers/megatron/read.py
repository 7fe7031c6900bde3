"""Reads Megatron-LM launch scripts into scenario keys, and lists what differs and what is ignored."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.files import read_text
from moesim.hwmodels.yaml_io import load_mapping
from moesim.simulator.model.shape import ModelShape
from moesim.simulator.scenario import Scenario
from moesim.simulator.schedules import name_from
from moesim.simulator.trainers.megatron.arguments import MODULES, megatron_arguments
from moesim.simulator.trainers.megatron.layout import layers_of_layout, mtp_stage_of_layout, parse_frequency

MOST_BYTES = 300_000
MOST_LINE = 30_000
"""Most characters of a line with its continuations, and of a text after its variables are expanded."""
MOST_EXPANDED = 300_000
"""Most characters of all texts whose variables are expanded."""

_ASSIGNMENT = re.compile(r"(?:export\s+)?([A-Za-z_]\w*)\+?=(.*)", re.DOTALL)
_ARRAY = re.compile(r"\$\{[A-Za-z_]\w*\[[@*]\]\}")
_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*)(?::?-([^}]{0,200}))?\}|([A-Za-z_]\w*))")

INTEGERS = {
    "--tensor-model-parallel-size": "parallel.tp",
    "--pipeline-model-parallel-size": "parallel.pp",
    "--expert-model-parallel-size": "parallel.ep",
    "--expert-tensor-parallel-size": "parallel.expert_tp",
    "--context-parallel-size": "parallel.cp",
    "--num-virtual-stages-per-pipeline-rank": "parallel.vpp",
    "--micro-batch-size": "parallel.microbatch",
    "--global-batch-size": "batch.sequences",
    "--seq-length": "batch.sequence_length",
    "--moe-deepep-num-sms": "communication.sms",
}
"""Flags with one integer, and the scenario key of each."""

_STRATEGIES = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}

UNDERSTOOD = {
    *INTEGERS, "--sequence-parallel", "--use-distributed-optimizer", "--use-megatron-fsdp",
    "--data-parallel-sharding-strategy", "--pipeline-model-parallel-layout", "--bf16", "--fp8-format",
    "--fp8-recipe", "--recompute-granularity", "--recompute-modules", "--moe-layer-freq",
}  # fmt: skip
"""Flags that change the scenario, or that have their own rule for the comparison with its model."""


@dataclass(frozen=True, slots=True)
class MegatronImport:
    """A launch script, read for a base scenario.

    `keys`: scenario keys and values that the script states. `differs`: sentences on where the script's model
    differs from the base scenario's. `ignored`: arguments, as written, that have no effect here.
    """

    keys: Mapping[str, Any]
    differs: tuple[str, ...]
    ignored: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def overrides(self) -> list[str]:
        """The keys as `key=value` overrides of a scenario."""
        return [f"{key}={json.dumps(value)}" for key, value in self.keys.items()]


def read_script(path: Path) -> dict[str, str | None]:
    """Read the arguments of a shell script, or of a YAML file with MODEL_ARGS, by flag; the last one counts.

    A shell script may have continued lines, quoted words, arrays, and variables that it sets itself. Nothing
    is run. Raises InputError for a file that cannot be read, unbalanced quotes and a file without arguments.
    """
    if path.suffix.lower() in (".yaml", ".yml"):
        data = load_mapping(path)
        values = {key: str(value) for key, value in _section(data, "ENV_VARS", path).items()}
        expansion = _Expansion(str(path), values)
        found = {
            flag: None if value is True else expansion.of(str(value))
            for flag, value in _section(data, "MODEL_ARGS", path).items()
            if value is not False
        }
    else:
        found = _read_shell(read_text(path, MOST_BYTES, "launch script of Megatron-LM"), str(path))
    if not found:
        raise InputError(f"{path}: holds no --argument; give the script or YAML file that starts Megatron-LM")
    return found


def _section(data: Mapping[str, Any], key: str, path: Path) -> dict[str, Any]:
    section = data.get(key) or {}
    if not isinstance(section, dict):
        raise InputError(f"{path}: {key}={str(section)[:60]!r} must be a mapping of names to values")
    return {str(name): value for name, value in section.items()}


def _read_shell(text: str, place: str) -> dict[str, str | None]:
    expansion = _Expansion(place, {})
    found: dict[str, str | None] = {}
    for number, line in enumerate(re.sub(r"\\\r?\n", " ", text).splitlines(), start=1):
        if len(line) > MOST_LINE:
            raise InputError(
                f"{place}, line {number} (continued lines count once): longer than the limit of "
                f"{MOST_LINE:,} characters"
            )
        try:
            words = shlex.split(line, comments=True)
        except ValueError as error:
            raise InputError(f"{place}, line {number} (continued lines count once): {error}") from None
        expanded: list[str] = []
        for word in words:
            match = _ASSIGNMENT.fullmatch(word)
            if match and not word.startswith("--"):
                expansion.variables[match[1]] = expansion.of(match[2])
                # An array or a quoted list of arguments is a list of words.
                word = match[2].removeprefix("(")
                if not word.startswith("--"):
                    continue
            if _ARRAY.fullmatch(word):
                continue  # its arguments were read where it was set
            expanded += _words(expansion.of(word))
        _flags(expanded, found)
    return found


def _words(text: str) -> list[str]:
    """Split a quoted or expanded list of arguments into words; any other text stays one word."""
    if not text.startswith("--") or " " not in text:
        return [text]
    try:
        return shlex.split(text)
    except ValueError:
        return [text]


def _flags(words: list[str], found: dict[str, str | None]) -> None:
    name: str | None = None
    for word in words:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word.partition("=")
            name = name.rstrip(")")
            found[name] = value if equals else None
            name = None if equals else name
        elif name is not None and word not in (")", "(", "&&", ";", "|", "&"):
            before = found[name]
            value = word if word.count("(") or not word.endswith(")") else word[:-1]
            found[name] = value if before is None else f"{before} {value}"
            if len(value) + len(before or "") > MOST_LINE:
                raise InputError(f"{name[:80]}: its values have more than {MOST_LINE:,} characters")
        elif word in ("&&", ";", "|", "&"):
            name = None


class _Expansion:
    """Expands known variables in texts, up to a limit of characters; errors name `place`."""

    def __init__(self, place: str, variables: dict[str, str]) -> None:
        self.variables = variables
        self._place, self._left = place, MOST_EXPANDED

    def of(self, text: str) -> str:
        """Expand the known variables of `text`; unknown ones stay as they are written.

        A variable that contains itself twice on every line grows without limit; InputError is raised before
        such a text is built.
        """
        if "$" not in text:
            return text
        parts, end, size = [], 0, 0
        for match in _VARIABLE.finditer(text):
            known = self.variables.get(match[1] or match[3])
            value = known if known is not None else match[2] if match[2] is not None else match[0]
            parts += [text[end : match.start()], value]
            end = match.end()
            size += len(parts[-2]) + len(value)
            self._spend(match[0], len(parts[-2]) + len(value), size)
        return "".join([*parts, text[end:]])

    def _spend(self, name: str, more: int, size: int) -> None:
        self._left -= more
        if size > MOST_LINE or self._left < 0:
            raise InputError(
                f"{self._place}: the variable {name[:80]!r} makes a text of more than {MOST_LINE:,} "
                f"characters, or all its variables more than {MOST_EXPANDED:,}; write the arguments out"
            )


def import_megatron(path: Path, base: Scenario, shape: ModelShape) -> MegatronImport:
    """Read a launch script for a base scenario, whose model is `shape`.

    Raises InputError, naming flag and value, for a value that cannot be read.
    """
    found = read_script(path)
    keys: dict[str, Any] = {}
    notes: list[str] = []
    for flag, key in INTEGERS.items():
        if flag in found:
            keys[key] = _integer(flag, found[flag])
    if shape.moe is not None:  # as Megatron-LM's own default
        keys.setdefault("parallel.expert_tp", keys.get("parallel.tp", 1))
    keys["parallel.sequence_parallel"] = "--sequence-parallel" in found
    keys["parallel.zero_stage"] = _zero(found)
    pp, vpp = keys.get("parallel.pp", 1), keys.get("parallel.vpp", 1)
    keys["schedule"] = name_from("megatron-lm", free_vpp=pp > 1 and vpp > 1)
    layout = found.get("--pipeline-model-parallel-layout")
    if layout:
        stages, layers = layers_of_layout(layout)
        if stages % pp:
            raise InputError(
                f"--pipeline-model-parallel-layout has {stages} stages, not a multiple of pp={pp}"
            )
        if layers is not None:
            mtp = mtp_stage_of_layout(layout)
            keys["stages"] = {"layers": list(layers)} | ({} if mtp is None else {"mtp": mtp})
        else:
            notes.append(
                f"--pipeline-model-parallel-layout {layout}: moesim keeps the embedding on the first stage, "
                f"the loss on the last and all MTP modules on one; its {stages} stages are balanced"
            )
        if stages > pp:
            keys["parallel.vpp"] = stages // pp
            keys["schedule"] = name_from("megatron-lm", free_vpp=True)
    keys["precision"] = "fp8" if "--fp8-format" in found or "--fp8-recipe" in found else "bf16"
    recipe = found.get("--fp8-recipe")
    if recipe not in (None, "blockwise"):
        notes.append(f"--fp8-recipe {recipe}: priced as the recipe fp8, whose scales are blockwise")
    keys["recompute"] = _recompute(found, notes)
    if "--overlap-moe-expert-parallel-comm" in found:
        notes.append(
            "--overlap-moe-expert-parallel-comm: moesim's 1F1B schedules do not overlap it; dualpipev does"
        )
    known, differs = _compared(found, base, shape)
    ignored = tuple(
        flag if value is None else f"{flag} {value}"
        for flag, value in found.items()
        if flag not in UNDERSTOOD and flag not in known
    )
    return MegatronImport(keys, tuple(differs), ignored, tuple(notes))


def _recompute(found: Mapping[str, str | None], notes: list[str]) -> str:
    """The recompute policy of the script's granularity and modules; the default module is core attention."""
    granularity = found.get("--recompute-granularity")
    if granularity not in (None, "selective", "full"):
        raise InputError(f"--recompute-granularity {granularity!r} is not one of selective, full")
    if granularity != "selective":
        return "full" if granularity else "none"
    modules = set((found.get("--recompute-modules") or MODULES["attention"]).split())
    if modules == {MODULES["attention"]}:
        return "attention"
    if modules != set(MODULES["selective"].split()):
        notes.append(
            f"--recompute-modules {' '.join(sorted(modules))}: priced as the policy selective, which "
            f"computes {MODULES['selective']} again"
        )
    return "selective"


def _integer(flag: str, text: str | None) -> int:
    if text is None or not re.fullmatch(r"\d{1,9}", text):
        raise InputError(
            f"{flag} {text or ''}: is not a whole number; set the variable in the script, or write it out"
        )
    return int(text)


def _zero(found: Mapping[str, str | None]) -> int:
    strategy = found.get("--data-parallel-sharding-strategy")
    if strategy is not None:
        if strategy not in _STRATEGIES:
            raise InputError(
                f"--data-parallel-sharding-strategy {strategy!r} is not one of {', '.join(_STRATEGIES)}"
            )
        return _STRATEGIES[strategy]
    return 1 if "--use-distributed-optimizer" in found else 0


def _compared(
    found: Mapping[str, str | None], base: Scenario, shape: ModelShape
) -> tuple[set[str], list[str]]:
    """Flags about the model that the base scenario determines, and sentences on where the script differs."""
    ours = megatron_arguments(base).arguments
    known = {flag for flag in ours if flag not in UNDERSTOOD}
    differs = []
    for flag in sorted(known & set(found)):
        if found[flag] != ours[flag]:
            differs.append(f"{flag}: the script says {found[flag]}, the scenario {ours[flag]}")
    frequency = found.get("--moe-layer-freq")
    if frequency is not None:
        theirs = parse_frequency(frequency, shape.n_layers)
        if theirs != tuple(int(shape.is_moe_layer(n)) for n in range(shape.n_layers)):
            differs.append(f"--moe-layer-freq: the script says {frequency}, the model has other MoE layers")
    return known, differs
