"""Numbers of precision recipes: short keys of prices, where the fields of a recipe take long to hash."""

from __future__ import annotations

from collections.abc import Iterable

from moesim.simulator.model.precision import Precision


class RecipeNumbers:
    """A number for each recipe, in the order in which they are first asked for."""

    def __init__(self, recipes: Iterable[Precision] = ()) -> None:
        """`recipes`: those that get the first numbers, so that keys are those of another process."""
        self._numbers: dict[Precision, int] = {}
        self._known: dict[int, tuple[Precision, int]] = {}
        for recipe in recipes:
            self.of(recipe)

    def of(self, recipe: Precision) -> int:
        """The number of a recipe; equal recipes have the same."""
        known = self._known.get(id(recipe))  # the entry keeps the recipe alive, and so its id
        if known is None:
            number = self._numbers.setdefault(recipe, len(self._numbers))
            known = self._known[id(recipe)] = recipe, number
        return known[1]

    @property
    def recipes(self) -> tuple[Precision, ...]:
        """The recipes in the order of their numbers."""
        return tuple(self._numbers)
