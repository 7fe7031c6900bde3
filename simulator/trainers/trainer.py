"""Description of a training framework: what it can run, and what it runs in another way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from importlib import resources
from typing import Annotated, Any, TypeVar

from msgspec import Struct
from pydantic import BaseModel, ConfigDict, Field, field_validator

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.validation import nearest, validate_model
from moesim.hwmodels.yaml_io import parse_mapping
from moesim.simulator.model.precision import Precision
from moesim.simulator.model.shape import ModelShape
from moesim.simulator.scenario import Scenario
from moesim.simulator.scenario.stated import is_stated
from moesim.simulator.schedules.spec import Project
from moesim.simulator.trainers.export import Export
from moesim.simulator.trainers.rules import (
    Exclusion,
    PlanFacts,
    check_words,
    facts_of,
    feature_exclusions,
    holds,
    missing_features,
)

FOLDER = "data/trainers"
PartT = TypeVar("PartT", bound=BaseModel)

_Texts = Annotated[tuple[str, ...], Field(strict=False)]


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    versions: _Texts = ()
    because: str


class Replacement(_Entry):
    """A key of a scenario that the trainer runs in another way than the scenario says."""

    key: str
    is_: Any = Field(alias="is")
    by: Any
    where: dict[str, Any] = Field(default_factory=dict)
    """Conditions on a plan for which the key matters."""


class _ExclusionEntry(_Entry):
    when: dict[str, Any]

    @field_validator("when")
    @classmethod
    def _known_words(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name, condition in value.items():
            check_words(condition, name)
        return value


class Description(BaseModel):
    """Data file of a trainer."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    title: str
    project: Project
    versions: _Texts
    """Newest first; the first is the default."""
    release: dict[str, str]
    """Version to the release of `software.framework` that prices it."""
    features: _Texts = ("gqa", "mla")
    """Names of `ModelShape.features` that its plans express; plans of models with any other are excluded."""
    search: dict[str, _Texts] = Field(default_factory=dict)
    """Values that a plan search tries by key, where the user leaves them to defaults; `recompute_dense` is
    for models without experts."""
    replacements: tuple[Replacement, ...] = ()
    exclusions: tuple[_ExclusionEntry, ...] = ()


class Writer(Struct, frozen=True):
    """Code of a trainer: what writes a scenario's plan for a version, and rules that need arithmetic."""

    export: Callable[[Scenario, str], Export]
    problems: Callable[[PlanFacts, str], Iterable[str]] | None = None
    """Reasons why a version cannot run a plan, whatever `sms` and `layers` are; None where the exclusions of
    the data file say all. With rules, exclusions only spare a search what the rules refuse anyway."""


class Trainer(Struct, frozen=True):
    """One version of a training framework."""

    name: str
    title: str
    version: str
    project: Project
    search: Mapping[str, tuple[str, ...]]
    replacements: tuple[Replacement, ...]
    exclusions: tuple[Exclusion, ...]
    writer: Writer
    release: str
    """Value of `software.framework` that prices what it does."""

    @property
    def label(self) -> str:
        """Name and version, such as "Megatron-LM 0.20"."""
        return f"{self.title} {self.version}"

    def problems(self, plan: PlanFacts) -> tuple[str, ...]:
        """Reasons why it cannot run a plan, as clauses; none where it can."""
        if self.writer.problems is not None:
            return tuple(self.writer.problems(plan, self.version))
        values = plan.values(self.project)
        return tuple(entry.because for entry in self.exclusions if entry.applies(values))

    def problems_of(self, scenario: Scenario) -> tuple[str, ...]:
        """As `problems`, for a scenario's plan. Raises InputError for a model that cannot be loaded."""
        return self.problems(facts_of(scenario))

    def arguments(self, scenario: Scenario) -> Export:
        """The scenario's plan as this version's arguments; what they cannot express is in `unspelled`."""
        return self.writer.export(scenario, self.version)

    def adapted(self, scenario: Scenario, any_plan: bool = False) -> tuple[Scenario, tuple[str, ...]]:
        """The scenario as the trainer would run it, with a sentence for each key that differs.

        `any_plan`: the plan is still to be chosen, so that keys count which do not matter for this one.
        """
        values = None if any_plan else facts_of(scenario).values(self.project)
        recipe, changed = self._adapted("precision", scenario.recipe, values)
        more: tuple[str, ...] = ()
        update: dict[str, Any] = {}
        for section in ("software", "communication"):
            part, sentences = self._adapted(section, getattr(scenario, section), values)
            if sentences:
                update[section], more = part, (*more, *sentences)
        if not changed and not more:
            return scenario, ()
        if changed:
            update["precision"] = recipe
        adapted = scenario.model_copy(update=update)
        if not is_stated(scenario, "precision"):  # still the choice of a rule, which a search may vary
            adapted.model_fields_set.discard("precision")
        return adapted, (*changed, *more)

    def adapted_recipe(self, recipe: Precision) -> tuple[Precision, tuple[str, ...]]:
        """A precision recipe as the trainer would run it, with a sentence for each field that differs."""
        return self._adapted("precision", recipe, None)

    def _adapted(
        self, section: str, part: PartT, values: Mapping[str, Any] | None
    ) -> tuple[PartT, tuple[str, ...]]:
        """A section as the trainer runs it; the same object where nothing differs."""
        fields, changed = dict(part), []
        stated = set(part.model_fields_set)
        for entry in self.replacements:
            place, _, key = entry.key.partition(".")
            matters = values is None or all(holds(c, values[name]) for name, c in entry.where.items())
            if place == section and fields[key] == entry.is_ and matters:
                fields[key] = entry.by
                stated.add(key)
                by, old = (
                    str(value).lower() if isinstance(value, bool) else str(value)
                    for value in (entry.by, entry.is_)
                )
                changed.append(f"{entry.key}={by} instead of {old}: {entry.because}")
        if not changed:
            return part, ()
        return type(part).model_validate({key: fields[key] for key in stated}), tuple(changed)


@cache
def description(name: str) -> Description:
    """The data file of a trainer."""
    text = resources.files("moesim.simulator").joinpath(FOLDER, f"{name}.yaml").read_text("utf-8")
    return validate_model(Description, parse_mapping(text, f"trainer {name}"), f"trainer {name}")


def unknown_features(name: str, shape: ModelShape) -> Iterator[str]:
    """A sentence for each feature of a model that the plan which a trainer is given cannot express."""
    data = description(name)
    for words in missing_features(shape, data.features):
        yield f"{words}: moesim knows no setting of {data.title} for it"


def build_trainer(name: str, version: str | None, writer: Writer) -> Trainer:
    """One version of a trainer, by default the newest; raises InputError for a version that is not known."""
    data = description(name)
    chosen = version or data.versions[0]
    if chosen not in data.versions:
        raise InputError(
            f"trainer {name}: version {chosen!r} is not known{nearest(chosen, list(data.versions))}; known: "
            f"{', '.join(data.versions)}"
        )
    own = [
        Exclusion(e.when, e.because, e.versions)
        for e in data.exclusions
        if not e.versions or chosen in e.versions
    ]
    exclusions = (*own, *feature_exclusions(data.features))
    replacements = tuple(r for r in data.replacements if not r.versions or chosen in r.versions)
    release = data.release[chosen]
    return Trainer(
        name, data.title, chosen, data.project, data.search, replacements, exclusions, writer, release
    )
