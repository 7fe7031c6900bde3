"""Limits a plan search to what a training framework can run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from moesim.hwmodels.arrays import BoolArray
from moesim.hwmodels.errors import InfeasibleError
from moesim.simulator.model.recompute import parse_recompute, recompute_label
from moesim.simulator.model.repeated import modules_of_model
from moesim.simulator.model.shape import ModelShape
from moesim.simulator.planner.frames import Frame
from moesim.simulator.planner.placements import placement_name
from moesim.simulator.planner.plan_arrays import inner_axes
from moesim.simulator.planner.refusals import Refusals, reason_of
from moesim.simulator.planner.space import PlanSpace, Space
from moesim.simulator.scenario import Scenario
from moesim.simulator.trainers.rules import (
    Exclusion,
    batch_values,
    facts_of,
    plan_values,
    recipe_values,
    recompute_values,
    schedule_values,
    sms_values,
)
from moesim.simulator.trainers.trainer import Trainer


class TrainerLimits(Struct, frozen=True, dict=True):
    """What a trainer can run of the plans of one scenario, whose model, batch and software are given."""

    trainer: Trainer
    scenario: Scenario

    @cached_property
    def _shape(self) -> ModelShape:
        return self.scenario.shape  # which looks up its file; a search asks for every frame

    @cached_property
    def _given(self) -> Mapping[str, Any]:
        """Facts that are the same for all plans of a search."""
        facts = facts_of(self.scenario)
        free = {*self._of_frame_names, *(name for axis in self._axes.values() for name in axis)}
        return {k: v for k, v in facts.values(self.trainer.project).items() if k not in free}

    @cached_property
    def _of_frame_names(self) -> frozenset[str]:
        facts = facts_of(self.scenario)
        own = plan_values(facts.shape, facts.parallel, facts.schedule, self.trainer.project)
        return frozenset({*own, *batch_values(facts.parallel, 1, 1)})

    @cached_property
    def _axes(self) -> Mapping[str, frozenset[str]]:
        """Names of the facts that each axis of a space decides."""
        scenario = self.scenario
        return {
            "schedule": frozenset(schedule_values(scenario.schedule, self.trainer.project)),
            "precision": frozenset(recipe_values(scenario.recipe)),
            "recompute": frozenset(recompute_values(scenario.recompute)),
            "sms": frozenset(sms_values(scenario.communication.sms)),
            "zero_stage": frozenset({"zero_stage"}),
            "placement": frozenset({"experts_in_order"}),
        }

    def chosen(self, wanted: PlanSpace, space: Space) -> tuple[Space, tuple[str, ...]]:
        """The space to search: the trainer's own recompute choices and recipes where the user names none.

        Returns it with sentences on values that the user named and the trainer has no words for. Raises
        InfeasibleError where nothing is left.
        """
        # The trainer may be able to run no plan of the model and software at all.
        for entry in self.trainer.exclusions:
            if entry.reads <= self._given.keys() and entry.applies(self._given):
                raise InfeasibleError(
                    f"{self.trainer.label} cannot train {self.scenario.shape.name} as the scenario says: "
                    f"{entry.because}"
                )
        recipes = [self.trainer.adapted_recipe(recipe)[0] for recipe in space.recipes]
        update: dict[str, Any] = {"precision": tuple(dict.fromkeys(recipes))}
        if wanted.recompute is None and "recompute" in self.trainer.search:
            # The trainer's choices whose modules the model has.
            have = modules_of_model(self._shape)
            search, dense = self.trainer.search, self._shape.moe is None
            texts = search["recompute_dense" if dense and "recompute_dense" in search else "recompute"]
            choices = map(parse_recompute, texts)
            update["recompute"] = tuple(
                choice for choice in choices if isinstance(choice, str) or have.issuperset(choice)
            )
        narrow, sentences = self.narrowed(replace(space, **update))
        return narrow, tuple(s for s in sentences if getattr(wanted, s.partition("=")[0]) is not None)

    def narrowed(self, space: Space) -> tuple[Space, tuple[str, ...]]:
        """The space without values that the trainer has no words for, with a sentence on each of them.

        Raises InfeasibleError if no value of an axis is left.
        """
        kept: dict[str, Any] = {}
        sentences: list[str] = []
        for axis in self._axes:
            values = getattr(space, axis)
            reasons = [self._reason_against(axis, value) for value in values]
            kept[axis] = tuple(v for v, reason in zip(values, reasons, strict=True) if reason is None)
            sentences += [
                f"{axis}={_shown(axis, value)} is not searched: {reason}"
                for value, reason in zip(values, reasons, strict=True)
                if reason is not None
            ]
            if not kept[axis]:
                raise InfeasibleError(f"{self.trainer.label} can run no plan of the space: {sentences[-1]}")
        return replace(space, **kept), tuple(sentences)

    def _reason_against(self, axis: str, value: Any) -> str | None:
        values = {**self._given, **self._values(axis, value)}
        own = self._axes[axis]
        for entry in self.trainer.exclusions:
            if entry.reads & own and entry.reads <= values.keys() and entry.applies(values):
                return entry.because
        return None

    def _values(self, axis: str, value: Any) -> Mapping[str, Any]:
        if axis == "schedule":
            return schedule_values(value, self.trainer.project)
        if axis == "precision":
            named = self.scenario.model_copy(update={"precision": value})
            return recipe_values(named.recipe if isinstance(value, str) else value)
        if axis == "recompute":
            return recompute_values(value)
        if axis == "sms":
            return sms_values(value)
        if axis == "placement":
            return {"experts_in_order": value is None}
        return {axis: value}

    def frames(self, frames: Sequence[Frame], per_frame: int, refused: Refusals) -> list[Frame]:
        """The frames that the trainer can run; the others are refused."""
        entries = [
            entry
            for entry in self.trainer.exclusions
            if entry.reads & self._of_frame_names and entry.reads <= self._given.keys() | self._of_frame_names
        ]
        kept = []
        for frame in frames:
            values = self._frame_values(frame)
            reason = next((entry.because for entry in entries if entry.applies(values)), None)
            if reason is None:
                kept.append(frame)
            else:
                refused.add(self._text(reason), per_frame, frame.label)
        return kept

    def combinations(self, frames: Sequence[Frame], space: Space, refused: Refusals) -> BoolArray:
        """Whether the trainer can run each plan [frames, precisions, policies, sms, ZeRO stages]."""
        runs = self._by_rules(frames, space, refused)
        known = self._given.keys() | self._of_frame_names
        values = [self._frame_values(frame) for frame in frames]
        for entry in self.trainer.exclusions:
            axes = [axis for axis in INNER if entry.reads & self._axes[axis]]
            if axes and not (len(axes) == 1 and entry.reads <= self._given.keys() | self._axes[axes[0]]):
                excluded = self._excluded(entry, values, space, known)
                refused.add(
                    self._text(entry.because),
                    int((runs & excluded).sum()) * len(space.placement),
                    frames[0].label,
                )
                runs &= ~excluded
        return runs

    def _by_rules(self, frames: Sequence[Frame], space: Space, refused: Refusals) -> BoolArray:
        """Whether the trainer's rules in code allow each plan; they do not depend on the SMs."""
        runs = np.ones((len(frames), *inner_axes(space)), dtype=bool)
        rules = self.trainer.writer.problems
        if rules is None:
            return runs
        given, weight = facts_of(self.scenario), len(space.sms) * len(space.placement)
        axes = (enumerate(space.recipes), enumerate(space.recompute), enumerate(space.zero_stage))
        choices = list(product(*axes))
        for number, frame in enumerate(frames):
            for (p, recipe), (r, recompute), (z, stage) in choices:
                plan = replace(
                    given,
                    parallel=frame.plan.model_copy(update={"zero_stage": stage}),
                    schedule=frame.schedule,
                    layers=None,
                    recipe=recipe,
                    recompute=recompute,
                )
                problem = next(iter(rules(plan, self.trainer.version)), None)
                if problem is not None:
                    runs[number, p, r, :, z] = False
                    refused.add(self._text(reason_of(problem)), weight, frame.label)
        return runs

    def _excluded(
        self,
        entry: Exclusion,
        frames: Sequence[Mapping[str, Any]],
        space: Space,
        known: frozenset[str] | set[str],
    ) -> BoolArray:
        """Plans [frames, ...] that one entry excludes: every condition is one array along its own axis.

        `frames`: the values of each frame.
        """
        whole = np.ones((len(frames), *inner_axes(space)), dtype=bool)
        part = replace(entry, when={k: c for k, c in entry.when.items() if k in known})
        hit = np.array([part.applies(values) for values in frames], dtype=bool)
        whole &= hit[:, None, None, None, None]
        for number, axis in enumerate(INNER, start=1):
            conditions = {k: c for k, c in entry.when.items() if k in self._axes[axis]}
            if conditions:
                part = replace(entry, when=conditions)
                holds = [part.applies(self._values(axis, value)) for value in getattr(space, axis)]
                shape = [1] * whole.ndim
                shape[number] = len(holds)
                whole &= np.array(holds, dtype=bool).reshape(shape)
        return whole

    def _frame_values(self, frame: Frame) -> Mapping[str, Any]:
        plan, layout = frame.plan, frame.layout
        return {
            **self._given,
            **plan_values(self._shape, plan, frame.schedule, self.trainer.project),
            **batch_values(plan, layout.n_gpus // (plan.tp * plan.cp * plan.pp), frame.microbatches),
        }

    def _text(self, reason: str) -> str:
        return f"{self.trainer.label}: {reason}"


INNER = ("precision", "recompute", "sms", "zero_stage")
"""Axes of a frame's plans, in the order of the arrays."""


def _shown(axis: str, value: Any) -> str:
    if axis == "placement":
        return placement_name(value)
    if axis == "recompute":
        return recompute_label(value)
    if axis == "precision" and not isinstance(value, str):
        return str(value.model_dump_json(exclude_defaults=True))
    return str(value)
