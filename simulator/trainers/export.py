"""A plan as the arguments of a trainer, with the variables that a user fills in."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Protocol

from msgspec import Struct, field

from moesim.hwmodels.errors import InputError
from moesim.simulator.scenario import Scenario


class Export(Protocol):
    """A plan as the input of a trainer."""

    @property
    def trainer(self) -> str:
        """Name and version of the trainer."""

    @property
    def unspelled(self) -> tuple[str, ...]:
        """What it cannot express, in sentences; none where the run is exactly the priced plan."""

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables that the trainer must find in its environment."""

    def command(self) -> tuple[str, ...]:
        """Words after `torchrun` that start the run, with paths as ${NAME}.

        Raises InputError where the trainer is not started by torchrun alone.
        """

    def text(self) -> str:
        """What a user copies or saves."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""


Words = str | tuple[str, ...] | None
"""Value of an argument: one word, several, or None for an argument without a value. A word such as
"$DATA_PATH" stands for a variable of the shell."""


class Arguments(Struct, frozen=True):
    """Arguments of a trainer for one plan, by group ("model", "parallelism", ...) and flag.

    `variables` maps the shell variables that the arguments use to what each must hold. `environment` holds
    what the trainer must find there. `unspelled` are sentences on what the arguments cannot express, so that
    the run would differ from what was priced; none where the run is exactly the priced plan. `comments` are
    further lines for the reader.
    """

    trainer: str
    headline: str
    groups: Mapping[str, Mapping[str, Words]]
    variables: Mapping[str, str]
    environment: Mapping[str, str]
    gpus: int
    program: str
    unspelled: tuple[str, ...] = ()
    comments: tuple[str, ...] = ()

    @property
    def arguments(self) -> dict[str, Words]:
        """All arguments by flag."""
        return {flag: value for group in self.groups.values() for flag, value in group.items()}

    def words(self, variables: Mapping[str, str]) -> list[str]:
        """The arguments as a program receives them, with the variables filled in.

        Raises KeyError for a variable that is missing.
        """
        found: list[str] = []
        for flag, value in self.arguments.items():
            values = () if value is None else (value,) if isinstance(value, str) else value
            found += [flag, *(variables[v[1:]] if v.startswith("$") else v for v in values)]
        return found

    def command(self) -> tuple[str, ...]:
        """The training script with its arguments, and paths as ${NAME}."""
        return self.program, *self.words({name: f"${{{name}}}" for name in self.variables})

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "trainer": self.trainer,
            "groups": {name: dict(group) for name, group in self.groups.items()},
            "variables": dict(self.variables),
            "environment": dict(self.environment),
            "gpus": self.gpus,
            "unspelled": list(self.unspelled),
        }

    def text(self) -> str:
        """A shell fragment: comments, the variables that must be set, and the array MODEL_ARGS and others.

        It ends with `TRAINING_ARGS=(...)`, which joins all groups.
        """
        lines = [f"# {self.trainer}: {self.headline}"]
        lines += [f"# {line}" for line in self.comments]
        lines += [f"# not spelled: {sentence}" for sentence in self.unspelled]
        lines += [f"export {name}={shlex.quote(value)}" for name, value in self.environment.items()]
        lines += [f': "${{{name}:?{holds}}}"' for name, holds in self.variables.items()]
        names = []
        for group, arguments in self.groups.items():
            names.append(f"{group.upper().replace(' ', '_')}_ARGS")
            lines.append(f"{names[-1]}=(")
            lines += [f"    {' '.join([flag, *quoted(value)])}" for flag, value in arguments.items()]
            lines.append(")")
        joined = " ".join(f'"${{{name}[@]}}"' for name in names)
        return "\n".join([*lines, f"TRAINING_ARGS=({joined})"]) + "\n"


class ConfigurationFile(Struct, frozen=True):
    """A plan as the configuration file of a trainer; `words` start it under torchrun, if that is enough."""

    trainer: str
    body: str
    unspelled: tuple[str, ...]
    words: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    """What the training script is given beside the file; the body says it as well."""

    def command(self) -> tuple[str, ...]:
        """The words after `torchrun`; raises InputError where the file belongs to a script of the user."""
        if not self.words:
            raise InputError(
                f"{self.trainer} is started by a script of your own that reads the exported configuration: "
                "no job file can name it; write the job for megatron, or for torchtitan@0.2.2"
            )
        return self.words

    def text(self) -> str:
        """The file; its own comments say what it cannot express."""
        return self.body

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        plain: dict[str, Any] = {"trainer": self.trainer, "text": self.body}
        if self.arguments:
            plain["arguments"] = list(self.arguments)
        return plain | {"unspelled": list(self.unspelled)}


def quoted(value: Words) -> list[str]:
    """The words of a value as a shell reads them back; variables stay variables."""
    values = () if value is None else (value,) if isinstance(value, str) else value
    return [f'"{v}"' if v.startswith("$") else shlex.quote(v) for v in values]


def _always(scenario: Scenario) -> bool:
    return True


def _has_experts(scenario: Scenario) -> bool:
    return scenario.shape.moe is not None


SETTINGS: Mapping[str, Callable[[Scenario], bool]] = {
    "parallel.shard_group": _always,
    "parallel.shard_optimizer_over_groups": _always,
    "routing.capacity": _has_experts,
    "software.attention": _always,
    "software.bucket_parameters": lambda scenario: scenario.software.overlap_data_parallel,
    "software.compiled_blocks": _always,
    "software.cuda_graphs": _always,
    "software.dropout": _always,
    "software.expert_kernels": _has_experts,
    "software.kernels": _always,
    "software.launch_blocking": _always,
    "software.loss": _always,
    "software.overlap_context_parallel": lambda scenario: scenario.parallel.cp > 1,
    "software.overlap_data_parallel": _always,
    "software.overlap_optimizer": _always,
    "software.overlap_tensor_parallel": lambda scenario: scenario.parallel.tp > 1,
    "software.parameter_gathers": _always,
    "software.recompute_stops_early": _always,
    "software.router": _has_experts,
    "software.static_experts": _has_experts,
}
"""Keys of a plan that frameworks have switches for, with the scenarios that they matter for. Degrees, batch,
schedule, stages, recompute, precision and dispatcher are not among them: all exports write or judge those."""


def unwritten(scenario: Scenario, written: Collection[str], trainer: str) -> Iterator[str]:
    """A sentence for every stated switch of a plan that an export does not write.

    `written` are the keys of `SETTINGS` that the export of `trainer` writes, or that its rules judge.
    """
    for key, matters in SETTINGS.items():
        section, _, name = key.partition(".")
        part = getattr(scenario, section)
        value = getattr(part, name)
        if section == "software" and name not in part.model_fields_set:
            continue  # the trainer's own
        if key not in written and value != type(part).model_fields[name].get_default() and matters(scenario):
            yield f"{key}={_shown(value)}: the export has no setting of {trainer} for it; set it yourself"


def _shown(value: Any) -> str:
    plain = value.model_dump(mode="json", exclude_none=True) if hasattr(value, "model_dump") else value
    if isinstance(plain, Mapping):
        return "{" + ", ".join(f"{key}: {_shown(inner)}" for key, inner in plain.items()) + "}"
    if isinstance(plain, list | tuple):
        return "[" + ", ".join(map(_shown, plain)) + "]"
    return str(plain).lower() if isinstance(plain, bool) else str(plain)


# -- variables ---------------------------------------------------------------------------------------
# Shell variables that exported arguments use for what no plan says.

VARIABLES: Mapping[str, str] = {
    "DATA_PATH": "the tokenised training data",
    "TOKENIZER_MODEL": "the tokenizer",
    "CHECKPOINT_DIR": "the folder of the checkpoints",
    "MEGATRON_PATH": "the checkout of Megatron-LM",
    "PLAN_FILE": "the configuration that moesim wrote",
    "LEARNING_RATE": "the peak learning rate",
    "ROTARY_BASE": "rope_theta of the config.json of the model",
}
"""What each variable must hold."""
