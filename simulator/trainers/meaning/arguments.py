"""Reads the arguments of every trainer as arguments of Megatron-LM, through a table of names."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from functools import lru_cache
from importlib import resources
from typing import Annotated, Any

from msgspec.structs import replace
from pydantic import Field, model_validator

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.frozen import Section
from moesim.hwmodels.validation import nearest, validate_model
from moesim.hwmodels.yaml_io import parse_mapping
from moesim.simulator.scenario import Scenario
from moesim.simulator.trainers.launch import Argument, LaunchFile, Machine, Unknown, Value
from moesim.simulator.trainers.meaning.given import StatedArgument, row_of, shown_value
from moesim.simulator.trainers.meaning.table import (
    Kind,
    MeaningRow,
    Table,
    TableEntry,
    UnknownArgumentError,
    forks,
)

FILE = "data/trainers/names.yaml"
VARIABLES_FILE = "data/trainers/wrappers.yaml"

NAMED_TRAINERS = ("megatron-bridge", "nemo", "torchtitan", "deepspeed")
"""Trainers whose files have names of their own; what such a file does not state is the base's."""

MOST_ARGUMENTS = 5000
"""Most arguments of a launch file."""

MOST_SHOWN = 4
"""Most unknown arguments that one message names."""

DECIDES = re.compile(
    r"parallel|expert|layer|hidden|head|batch|seq|recomput|checkpoint.activ|activation|fp4|fp8|bf16|fp16|precision"
    r"|dtype|zero|shard|fsdp|dispatch|flavor|nodes|nproc|gpus|world.size|vocab|offload|pipeline|overlap|degree"
    r"|microb|topk|top.k|lora|deepep|hybridep",
    re.IGNORECASE,
)
"""Words in names of arguments that decide a plan: node size, degrees, batch, model, precision, recomputation,
sharding and dispatcher. Such an argument is refused where no table has it, also with --ignore-unknown."""

MEGATRONS_COMPANION = "deepspeed"
"""Whose names may stand beside Megatron-LM's arguments: Megatron-DeepSpeed reads a DeepSpeed file too."""


class _Name(Section):
    """The argument of Megatron-LM that a name stands for."""

    argument: str
    opposite: bool = False
    values: Annotated[dict[str, Any], Field(default_factory=dict)]

    @model_validator(mode="before")
    @classmethod
    def _short(cls, data: object) -> object:
        return {"argument": data} if isinstance(data, str) else data


class _Trainer(Section):
    """Names of one trainer."""

    like_megatron: tuple[str, ...]
    arguments: dict[str, _Name]
    irrelevant: dict[str, str]
    not_priced: dict[str, str]
    defaults: Annotated[dict[str, Any], Field(default_factory=dict)]
    internal: tuple[str, ...] = ()
    off: tuple[str, ...] = ()


@lru_cache(maxsize=1)
def _names() -> Mapping[str, _Trainer]:
    text = (resources.files("moesim.simulator") / FILE).read_text("utf-8")
    return {
        name: validate_model(_Trainer, data, f"{FILE}: {name}")
        for name, data in parse_mapping(text, FILE).items()
    }


def collect(
    launch: LaunchFile, table: Table, ignore: Collection[str] = (), ignore_unknown: bool = False
) -> tuple[dict[str, StatedArgument], list[MeaningRow]]:
    """Arguments by Megatron-LM's names, the last of several values, and rows on those that are not used.

    `ignore_unknown` passes over arguments that no table has, a row for each, unless their names say that they
    decide the plan. Raises InputError for unknown, ambiguous and refused arguments, and for those in `ignore`
    that the file does not have.
    """
    if len(launch.arguments) > MOST_ARGUMENTS:
        raise InputError(
            f"the file has {len(launch.arguments)} arguments, above the limit of {MOST_ARGUMENTS:,}"
        )
    known_names = {argument.name for argument in launch.arguments} | set(launch.environment)
    for name in sorted(set(ignore) - known_names):
        raise InputError(f"--ignore {name[:80]}: the file does not have this argument; leave it out")
    trainer = _names()[launch.trainer if launch.trainer in NAMED_TRAINERS else MEGATRONS_COMPANION]
    stated: dict[str, StatedArgument] = {}
    rows: list[MeaningRow] = []
    refused: list[str] = []
    for argument in launch.arguments:
        try:
            meanings = _of_fork(argument, table, ignore) or _read(argument, trainer, table, ignore)
        except UnknownArgumentError as error:
            if ignore_unknown and not DECIDES.search(argument.name.rpartition(".")[2]):
                text = "nobody knows it; passed over by --ignore-unknown"
                value = shown_value(argument.value)
                rows.append(MeaningRow(argument.name, value, "ignored", text, argument.place))
            else:
                remedy = ", by its name since it may decide the plan" if ignore_unknown else ""
                refused.append(str(error) + remedy)
            continue
        except InputError as error:
            refused.append(str(error))
            continue
        for one in meanings:
            if isinstance(one, MeaningRow):
                rows.append(one)
                continue
            before = stated.get(one.entry.name)
            if before is not None and shown_value(before.value) != shown_value(one.value):
                text = f"given twice, the last counts: {one.written} {shown_value(one.value)} in {one.place}"
                value = shown_value(before.value)
                rows.append(MeaningRow(before.written, value, "ignored", text, before.place))
            stated[one.entry.name] = one
    if refused:
        left = len(refused) - MOST_SHOWN
        raise InputError("; ".join(refused[:MOST_SHOWN]) + (f"; and {left} more" if left > 0 else ""))
    rows += _state_defaults(launch, trainer, stated, table)
    return stated, rows + [row for one in stated.values() for row in row_of(one, table)]


def _state_defaults(
    launch: LaunchFile, trainer: _Trainer, stated: dict[str, StatedArgument], table: Table
) -> list[MeaningRow]:
    """State what the trainer takes by default, and return rows on a file of DeepSpeed that is not read."""
    # Versions of Megatron-LM that do not take Transformer Engine's attention by default.
    old = [one.name for one in launch.arguments if one.name.removeprefix("--") in forks().local_kernels]
    if old:
        place = f"default of the version of Megatron-LM that knows {old[0]}"
        entry = table.entries["transformer-impl"]
        local = StatedArgument("--transformer-impl", "local", place, entry, is_default=True)
        stated.setdefault(entry.name, local)
    # The file of DeepSpeed, where the script does not hold what it says about ZeRO.
    text = "the direction is unknown: this file is not read, and its ZeRO stage counts as the one of the rest"
    rows = [
        MeaningRow(one.name, shown_value(one.value), "not priced", text, one.place)
        for one in launch.arguments
        if one.name in ("--deepspeed_config", "--deepspeed-config") and "zero-stage" not in stated
    ]
    for name, default in trainer.defaults.items():
        place = f"default of {launch.trainer}"
        stated.setdefault(name, StatedArgument(name, default, place, _entry(name, table), is_default=True))
    return rows


def _of_fork(argument: Argument, table: Table, ignore: Collection[str]) -> list[StatedArgument]:
    """The arguments of Megatron-LM that one of a fork or an older version stands for; none for others."""
    name = argument.name.removeprefix("--")
    if not argument.name.startswith("--") or argument.name in ignore:
        return []
    means = forks().means(name, argument.value)
    if means is not None:
        text = shown_value(argument.value)
        return [
            StatedArgument(argument.name, value, argument.place, _entry(other, table), text)
            for other, value in means
        ]
    entry = forks().entries.get(name)
    return [] if entry is None else [StatedArgument(argument.name, argument.value, argument.place, entry)]


def _read(
    argument: Argument, trainer: _Trainer, table: Table, ignore: Collection[str]
) -> list[StatedArgument | MeaningRow]:
    """The argument by Megatron-LM's name, or a row on why it has none."""
    text = shown_value(argument.value)

    def row(kind: Kind, meaning: str) -> list[StatedArgument | MeaningRow]:
        return [MeaningRow(argument.name, text, kind, meaning, argument.place)]

    if argument.name in ignore:
        return row("ignored", "you said so")
    if not argument.name:
        return row("ignored", "a word that belongs to no argument")
    # The name as its file writes it: without dashes, Hydra's signs and NeMo's prefix.
    name = argument.name.lstrip("+~")
    if name.startswith("--") and "." in name:
        name = name[2:].replace("-", "_")
    name = name.removeprefix("training.") if name.startswith(_PREFIXED) else name
    section, dot, last = name.rpartition(".")
    known = trainer.arguments.get(name)
    is_off = argument.value in (None, False, "", ())
    if name in trainer.internal:
        return row("irrelevant", "internal to the trainer, or follows from other values")
    if name in trainer.off and is_off:
        return row("irrelevant", "off")
    if known is not None:
        value = _value(known, argument.value)
        if value is argument.value is None:
            value = _without_value(known.argument, argument, table)
        if value is None or text == "auto":
            return row("base", "the file leaves it open, so the base's counts")
        return [StatedArgument(argument.name, value, argument.place, _entry(known.argument, table), text)]
    alike = table.entries.get(last.replace("_", "-"))
    if dot and section in trainer.like_megatron and alike is not None:
        value = argument.value
        value = _without_value(alike.name, argument, table) if value is None else value
        if value is None:
            return row("base", "the file leaves it open, so the base's counts")
        return [StatedArgument(argument.name, value, argument.place, alike, text)]
    section = name
    while section:  # the name itself and the sections that hold it, the narrowest first
        if section in trainer.irrelevant:
            return row("irrelevant", trainer.irrelevant[section])
        if section in trainer.not_priced and is_off and not name.startswith("--"):
            return row("irrelevant", "off")
        if section in trainer.not_priced:
            return row("not priced", f"the direction is unknown: {trainer.not_priced[section]}")
        section = section.rpartition(".")[0]
    if name.startswith("--"):
        entry = table.entry(name, argument.place)
        return [StatedArgument(argument.name, argument.value, argument.place, entry)]
    hint = nearest(name, list(trainer.arguments))
    raise UnknownArgumentError(
        f"{argument.place}: {name[:80]!r} is not known{hint}; correct it, or give --ignore {name[:80]} if it "
        "changes neither time nor memory"
    )


def _without_value(name: str, argument: Argument, table: Table) -> Value:
    """What an explicit None says: off, or None where the base counts.

    Raises InputError for an argument that decides the plan and has no value that means off.
    """
    if name in table.needs_value:
        raise InputError(
            f"{argument.place}: {argument.name} = None: what the trainer takes for it is not known; write "
            f"the value, or give --ignore {argument.name} to take the base's"
        )
    return table.without_value.get(name)


_PREFIXED = ("training.trainer.", "training.model.", "training.exp_manager.", "training.run.")


def _entry(name: str, table: Table) -> TableEntry:
    return TableEntry(name, "used") if name in table.own else table.entries[name]


def _value(known: _Name, value: Value | Unknown) -> Value | Unknown:
    """The value as Megatron-LM's argument has it; None where the file leaves it open."""
    if isinstance(value, Unknown):
        return value
    if value is None:
        off: Value = known.values.get("null")
        return off
    text = str(value).lower() if isinstance(value, bool) else str(value)
    if known.values:
        changed: Value = known.values.get(text, known.values.get("*", value))
        return changed
    if known.opposite:
        return text.lower() not in ("true", "1")
    return value


class _Variables(Section):
    """Variables of wrapper scripts, and the arguments that they, or their values, stand for."""

    shorthand: dict[str, str]
    choices: dict[str, dict[str, dict[str, Any]]]


@lru_cache(maxsize=1)
def _variables() -> _Variables:
    text = (resources.files("moesim.simulator") / VARIABLES_FILE).read_text("utf-8")
    return validate_model(_Variables, parse_mapping(text, VARIABLES_FILE), VARIABLES_FILE)


NODES = "NNODES"

HOSTS_OF_FOUR = "GB200_CLUSTER"
"""Variable whose value 1 says that a node has four GPUs."""

IN_A_NODE = ("GPUS_PER_NODE", "NPROC_PER_NODE", "GPU_PER_NODE", "NUM_GPUS_PER_NODE", "NGPUS_PER_NODE")
"""Variables that hold the GPUs of a node."""

_UNDECIDING = re.compile(
    r"MODEL|COMMENT|CLUSTER|ACCOUNT|PARTITION|SEGMENT|PROFILE|PRETRAIN|DRY_RUN|DATASET|MCORE_RELEASE_VERSION"
    r"|USE_MNNVL|(WANDB|HF|SLURM|NCCL|CUDA|TORCH|TORCHINDUCTOR|PYTORCH|NVTE|OMP|UB|UCX|NVSHMEM|NVLINK|TRITON|PYTHON"
    r"|LD|GLOO|NUM_OF_HYBRID_EP|MASTER|RANK|NODE_RANK|TOKENIZERS)(_.*)?"
    r"|PYTHON.*|(.*_)?(PATH|DIR|FOLDER|ROOT|FILE|IMAGE|MOUNTS|PROJECT|TOKEN|KEY|HOME|NAME|LOGS?|CACHE|ADDR|PORT"
    r"|SCRIPT|TIME|URL|USER|HOSTS?|HOSTFILE|STEPS?|ITERS?|SEED|LR|TOKENIZER(_MODEL)?|ID)"
)
"""Variables that name things, or settings of libraries: they decide nothing of the plan."""

_SCRIPTS = (".sh", ".bash", ".slurm", ".sbatch", ".sub")
_OFF = ("", "false", "none")


def starts_another_script(launch: LaunchFile) -> bool:
    """Whether the file starts a script instead of a training program, so that it holds a part only."""
    return launch.program is not None and launch.program.lower().endswith(_SCRIPTS)


def with_nodes(launch: LaunchFile) -> LaunchFile:
    """The launch with the nodes of its variable NNODES, where it names no machine itself."""
    nodes = _count(launch, NODES)
    if launch.machine.nodes is not None or nodes is None:
        return launch
    stated = (_count(launch, name) for name in IN_A_NODE)
    four = 4 if launch.environment.get(HOSTS_OF_FOUR) == "1" else None
    gpus = launch.machine.gpus_per_node or next((n for n in stated if n is not None), four)
    shown = shown_value(launch.environment[NODES])
    return replace(launch, machine=Machine(nodes, gpus, {"nodes": f"the variable {NODES}={shown}"}))


def _count(launch: LaunchFile, name: str) -> int | Unknown | None:
    """The number that a variable holds; None where it is not set."""
    value = launch.environment.get(name)
    if value is None or isinstance(value, Unknown):
        return value
    if value.isascii() and value.isdigit() and len(value) < 8:
        return int(value)
    return Unknown(value, "it is no whole number") if value else None


def read_variables(
    launch: LaunchFile,
    stated: dict[str, StatedArgument],
    table: Table,
    base: Scenario,
    ignore: Collection[str] = (),
) -> list[MeaningRow]:
    """Add the arguments that variables stand for to `stated`, and return rows on all other variables.

    Raises InputError for a variable of which it is not known what it decides, unless `ignore` names it.
    """
    rows = []
    for name, value in launch.environment.items():
        text = shown_value(value)
        if name in ignore:
            rows.append(MeaningRow(name, text, "ignored", "you said so", "environment"))
            continue
        if text.lower() in _OFF or name in (NODES, *IN_A_NODE, HOSTS_OF_FOUR):
            continue
        if name in _variables().shorthand:
            _state_variable(stated, _variables().shorthand[name], name, value, table)
        elif name in _variables().choices:
            rows += _chosen(launch, stated, table, base, name, text)
        elif _UNDECIDING.fullmatch(name):
            meaning = f"the direction is unknown: a variable for {launch.program}, which is not read"
            rows.append(MeaningRow(name, text, "not priced", meaning, "environment"))
        else:
            raise InputError(
                f"environment: {name}={text[:60]} is for {launch.program}, which is not read, and what it "
                f"decides is not known; give arguments in its place, and --ignore {name}"
            )
    return rows


def _chosen(
    launch: LaunchFile,
    stated: dict[str, StatedArgument],
    table: Table,
    base: Scenario,
    name: str,
    text: str,
) -> list[MeaningRow]:
    """State the arguments of a variable with few values; a row where they change nothing."""
    choices = _variables().choices[name]
    if text not in choices:
        raise InputError(
            f"environment: {name}={text[:60]} is not known; known: {', '.join(choices)}; correct it, or give "
            f"--ignore {name} if it changes neither time nor memory"
        )
    arguments = choices[text]
    if name == "PR" and text == base.recipe.linear == "bf16":
        return [MeaningRow(name, text, "base", "the precision is BF16, as the base's", "environment")]
    for argument, value in arguments.items():
        _state_variable(stated, argument, name, value, table, text)
    if not arguments:
        return [MeaningRow(name, text, "irrelevant", "adds no argument with this value", "environment")]
    return [row for argument in arguments for row in row_of(stated[argument], table)]


def _state_variable(
    stated: dict[str, StatedArgument],
    argument: str,
    name: str,
    value: Any,
    table: Table,
    text: str | None = None,
) -> None:
    """State an argument that a variable stands for, unless the file gives it itself."""
    if argument not in stated:
        stated[argument] = StatedArgument(name, value, "environment", table.entries[argument], text)
