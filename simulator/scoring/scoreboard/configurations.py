"""Settings that the published configurations behind a row state and its table leaves out.

`data/published/configurations.csv` has one line for each setting: configuration, file, revision, line, key,
value, and its meaning here. `configuration-rows.csv` says which rows a configuration belongs to, by source,
model, hardware and precision, never by a measurement. A setting without a field here is listed with the row.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, NonNegativeInt, PositiveInt

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.frozen import Frozen
from moesim.hwmodels.validation import validate_model
from moesim.simulator.frameworks.software import PLAIN, Software
from moesim.simulator.model.precision import Format
from moesim.simulator.model.recompute import RecomputeKey, RecomputePolicy
from moesim.simulator.scoring import published_records
from moesim.simulator.scoring.scoreboard.rows import OpenRow

SETTINGS, BEHIND = "configurations.csv", "configuration-rows.csv"
LEFT_OUT = "left out"
"""Value of the column `here` for a setting that the model cannot express; its note says how it is priced."""


def _layers(text: object) -> object:
    """Layers of every stage from a text such as "4*15 1", which means fifteen stages of 4 and one of 1."""
    if not isinstance(text, str):
        return text
    parts = (word.partition("*") for word in text.split())
    return tuple(n for each, _, times in parts for n in [int(each)] * int(times or 1))


class Published(Frozen):
    """The settings of a row's configurations; None if no configuration states the field.

    Each field means the same as in `Precision`, `ParallelPlan` or `ModelShape`.
    """

    recompute: RecomputeKey | None = None
    """A policy, or modules joined by "+"."""
    selective_means: RecomputePolicy | None = None
    """The policy that a table of this source calls selective."""
    zero_stage: NonNegativeInt | None = None
    shard_group: PositiveInt | None = None
    shard_optimizer_over_groups: bool | None = None
    sequence_parallel: bool | None = None
    mbs: PositiveInt | None = None
    run_mbs: PositiveInt | None = None
    """Micro-batch in the place of a table's that contradicts the table's other columns."""
    vpp: PositiveInt | None = None
    ep: PositiveInt | None = None
    expert_tp: PositiveInt | None = None
    stages: Annotated[tuple[int, ...] | None, BeforeValidator(_layers)] = None
    """Decoder layers of every stage."""
    embedding_as_layers: bool | None = None
    """Whether embedding and head count as one layer each when layers are spread over stages."""
    dispatcher: str | None = None
    library_sms: NonNegativeInt | None = None
    dispatcher_sms: PositiveInt | None = None
    gradient_reduce: Literal["fp32", "bf16"] | None = None
    gradients: Format | None = None
    gradients_twice: bool | None = None
    parameter_gather: Literal["fp32", "bf16", "fp8"] | None = None
    tensor_gather: Literal["fp8", "bf16"] | None = None
    parameters: Literal["bf16", "fp8", "fp32"] | None = None
    master_weights: Format | None = None
    moments: Format | None = None
    attention_format: Literal["fp8", "bf16"] | None = None
    """Format of the core attention's operands (`Precision.attention`)."""
    fp8_scales: Literal["delayed", "current", "tile", "mx"] | None = None
    """Scales of FP8 GEMMs; `tile` and `mx` set `Precision.scaling`."""
    overlap_expert_parallel: bool | None = None
    """All-to-alls run behind the compute of another micro-batch: 1F1B of overlapped pairs."""
    tied_embeddings: bool | None = None
    vocab: PositiveInt | None = None
    mtp: NonNegativeInt | None = None
    dense_layers: NonNegativeInt | None = None
    """Number of first layers with a dense FFN, if a shortened model differs from the whole one."""
    profile: str | None = None
    software: Software = PLAIN
    """The switches that a configuration states, and the others at their defaults."""


SWITCHES = Software.model_fields.keys() - Published.model_fields.keys() - {"framework"}
"""Fields of the table that are switches of `software`; "none" and words joined by blanks are CUDA graphs."""


class Setting(Frozen):
    """One line of `configurations.csv`; without a repository it is an assumption, stated in the note."""

    configuration: str
    repository: str
    revision: str
    file: str
    line: str
    key: str
    value: str
    field: str
    here: str
    note: str

    @property
    def place(self) -> str:
        """Text that says where the setting is published."""
        if not self.repository:
            return f"assumed: {self.note}"
        return f"{self.repository}@{self.revision} {self.file}:{self.line} {self.key}"


class Behind(Frozen):
    """The rows that a configuration belongs to, given by prefixes of their columns; empty matches any.

    `precision` after "=" and `pp` must match exactly. `notes` must occur in the row's notes, or, after "!",
    must not occur there.
    """

    configuration: str
    source: str
    group: str
    model: str
    hardware: str
    precision: str
    pp: str
    notes: str

    def holds(self, row: OpenRow) -> bool:
        """Whether the configuration belongs to a row."""
        exact = self.precision.startswith("=")
        part = self.notes.removeprefix("!")
        return (
            row.source.startswith(self.source)
            and (not self.group or row.group == self.group)
            and row.model.startswith(self.model)
            and row.hardware.startswith(self.hardware)
            and (row.precision == self.precision[1:] if exact else row.precision.startswith(self.precision))
            and (not self.pp or row.pp == int(self.pp))
            and (not part or (part in row.notes) != self.notes.startswith("!"))
        )


def settings_of(row: OpenRow) -> tuple[Setting, ...]:
    """Every setting of every configuration behind a row, in the order of the file."""
    names = {behind.configuration for behind in behind_rows() if behind.holds(row)}
    return tuple(setting for setting in settings() if setting.configuration in names)


@lru_cache(maxsize=1024)
def published_of(row: OpenRow) -> Published:
    """The settings of the configurations behind a row. Raises InputError if two of them contradict."""
    chosen: dict[str, Setting] = {}
    for setting in settings_of(row):
        if not setting.field:
            continue
        other = chosen.setdefault(setting.field, setting)
        if other.here != setting.here:
            raise InputError(
                f"{SETTINGS}: {row.id} has two values of {setting.field}: {other.here} ({other.place}) and "
                f"{setting.here} ({setting.place}); one configuration must not stand behind it"
            )
    return read_settings({name: setting.here for name, setting in chosen.items()}, f"{SETTINGS}: {row.id}")


def read_settings(values: Mapping[str, str], place: str) -> Published:
    """The settings of texts by field of the table. Raises InputError with the place for a malformed one."""
    switches: dict[str, Any] = {name: text for name, text in values.items() if name in SWITCHES}
    if "cuda_graphs" in switches:
        switches["cuda_graphs"] = tuple(switches["cuda_graphs"].replace("none", "").split())
    others = {name: text for name, text in values.items() if name not in SWITCHES}
    return validate_model(Published, {**others, "software": switches}, place)


def left_out_of(row: OpenRow) -> tuple[str, ...]:
    """Notes on the settings of a row's configurations that the prediction does not express."""
    return tuple(dict.fromkeys(s.note for s in settings_of(row) if s.here == LEFT_OUT))


PLAN = {"mbs": "micro-batch", "vpp": "virtual stages", "ep": "expert-parallel degree"}
"""Columns of a table that a configuration also states."""


def _other_plan(row: OpenRow) -> dict[str, int]:
    """The columns of a table's plan that its configuration has otherwise, with the configuration's values."""
    pairs = {key: (getattr(row, key), getattr(published_of(row), key)) for key in PLAN}
    return {key: other for key, (stated, other) in pairs.items() if stated and other and stated != other}


def differs_from(row: OpenRow, priced: str = "the table's") -> tuple[str, ...]:
    """Notes on where a table's plan differs from its configuration's, and which of the two is `priced`."""
    run = published_of(row).run_mbs
    found = [
        f"the table has {PLAN[key]} {getattr(row, key)}, the configuration of its release {other}: priced "
        f"with {priced}"
        for key, other in _other_plan(row).items()
        if not (run and key == "mbs")
    ]
    if run:
        found.append(
            f"the table's micro-batch {row.mbs} contradicts its accumulation and global batch: priced with "
            f"{run}, its release's"
        )
    return tuple(found)


def as_configured(row: OpenRow) -> OpenRow | None:
    """A row with its configuration's plan in the place of its table's; None where they do not differ."""
    other = _other_plan(row)
    return row.model_copy(update=other) if other else None


@lru_cache(maxsize=1)
def settings() -> tuple[Setting, ...]:
    """Every published setting, in the file's order. Raises InputError for a malformed line."""
    found = tuple(validate_model(Setting, record, SETTINGS) for record in published_records(SETTINGS))
    for setting in found:
        if setting.field not in ("", *Published.model_fields, *SWITCHES):
            raise InputError(f"{SETTINGS}: {setting.place}: field {setting.field!r} is not known")
    return found


@lru_cache(maxsize=1)
def behind_rows() -> tuple[Behind, ...]:
    """The rows that each configuration belongs to. Raises InputError for a malformed line."""
    return tuple(validate_model(Behind, record, BEHIND) for record in published_records(BEHIND))
