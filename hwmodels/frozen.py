"""Base classes of descriptions and results, which never change, and keys of caches."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from msgspec import Struct
from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler

if TYPE_CHECKING:
    from pydantic.json_schema import JsonSchemaValue
    from pydantic_core import CoreSchema


# -- base classes ----------------------------------------------------------------------------------


class Frozen(BaseModel):
    """Data that never changes once it is read; unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Pydantic's copy, in a third of its time; the values of `update` are not validated."""
        if deep or self.__pydantic_private__ is not None:
            return super().model_copy(update=update, deep=deep)
        copied = type(self).__new__(type(self))
        values, stated = self.__dict__.copy(), self.__pydantic_fields_set__.copy()
        if update:
            values.update(update)
            stated.update(update)
        for name, value in (
            ("__dict__", values),
            ("__pydantic_fields_set__", stated),
            ("__pydantic_extra__", None),
            ("__pydantic_private__", None),
        ):
            object.__setattr__(copied, name, value)
        return copied


class Documented(BaseModel):
    """A model whose JSON Schema describes each field by the docstring below it.

    Pydantic's `use_attribute_docstrings` reads the sources of all models whenever they are imported, which
    takes longer than a prediction; here they are read when a schema is written.
    """

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """The schema with a description of every field that has none of its own."""
        written = handler(schema)
        properties = handler.resolve_ref_schema(written).get("properties", {})
        for name, text in descriptions(cls).items():
            field = properties.get(cls.model_fields[name].alias or name)
            if field is not None:
                field.setdefault("description", text)
        return written


class Section(Frozen, Documented):
    """A section of a file; the docstring below each field describes its key."""


@lru_cache(maxsize=512)
def descriptions(model: type[BaseModel]) -> dict[str, str]:
    """The description of every field of a model that has one: the stated one, else the docstring below it."""
    written: dict[str, str] = {}
    for part in reversed(model.__mro__):
        if issubclass(part, Documented) and part.__module__ != __name__:
            written |= _docstrings(part)
    stated = {name: field.description for name, field in model.model_fields.items()}
    texts = {name: text or written.get(name) for name, text in stated.items()}
    return {name: text for name, text in texts.items() if text}


def _docstrings(model: type[BaseModel]) -> dict[str, str]:
    """The texts below the annotated names of a class, as its source has them."""
    source = textwrap.dedent(inspect.getsource(model))
    body = ast.parse(source).body[0]
    assert isinstance(body, ast.ClassDef), "the source of a class"
    texts: dict[str, str] = {}
    for line, below in zip(body.body, body.body[1:], strict=False):
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
            match below:
                case ast.Expr(value=ast.Constant(value=str() as text)):
                    texts[line.target.id] = inspect.cleandoc(text)
    return texts


# -- keys of caches --------------------------------------------------------------------------------

Value = TypeVar("Value")


class SameObject(Struct, Generic[Value], frozen=True, eq=False):
    """Equals only another key of the same object, so that `lru_cache` neither hashes nor compares contents.

    The key keeps the object alive. Functions that are cached so must be pure, and their values immutable.
    """

    value: Value

    def __hash__(self) -> int:
        """Hash of the object's identity."""
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        """Whether both keys stand for the same object."""
        return isinstance(other, SameObject) and self.value is other.value
