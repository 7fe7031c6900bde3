"""Parses untrusted XML: elements and attributes only, no document types, entities or instructions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NoReturn
from xml.parsers import expat

from moesim.hwmodels.errors import InputError

MAX_ELEMENTS = 20_000
MAX_DEPTH = 64
MAX_ATTRIBUTE = 10_000


@dataclass(slots=True)
class Element:
    """One element: its tag, attributes and children."""

    tag: str
    attributes: dict[str, str]
    children: list[Element] = field(default_factory=list)

    def all(self, *tags: str) -> Iterator[Element]:
        """This element and everything below it with one of these tags, in document order."""
        if self.tag in tags:
            yield self
        for child in self.children:
            yield from child.all(*tags)


def parse_xml(text: str, name: str) -> Element:
    """The root element of `text`; errors mention the file `name` and the line.

    Raises InputError for malformed XML, anything that declares a document type or entity (nested entities
    expand to gigabytes, external ones read other files), processing instructions, and documents beyond
    20,000 elements or 64 levels.
    """
    parser = expat.ParserCreate()
    root: list[Element] = []
    stack: list[Element] = []
    count = 0

    def refuse(what: str) -> NoReturn:
        raise InputError(f"{name}: line {parser.CurrentLineNumber}: {what}")

    def start(tag: str, attributes: dict[str, str]) -> None:
        nonlocal count
        count += 1
        if count > MAX_ELEMENTS or len(stack) >= MAX_DEPTH:
            refuse(f"more than {MAX_ELEMENTS:,} elements or {MAX_DEPTH} levels; this is no topology")
        if any(len(value) > MAX_ATTRIBUTE for value in attributes.values()):
            refuse(f"an attribute of <{tag[:40]}> is longer than {MAX_ATTRIBUTE:,} characters")
        element = Element(tag, attributes)
        (stack[-1].children if stack else root).append(element)
        stack.append(element)

    parser.StartElementHandler = start
    parser.EndElementHandler = lambda tag: stack.pop() and None
    parser.StartDoctypeDeclHandler = lambda *_: refuse("a document type (DTD) is refused; delete it")
    parser.EntityDeclHandler = lambda *_: refuse("an entity declaration is refused; write the text out")
    parser.UnparsedEntityDeclHandler = lambda *_: refuse("an entity declaration is refused")
    parser.ExternalEntityRefHandler = lambda *_: refuse("an external entity is refused")
    parser.ProcessingInstructionHandler = lambda *_: refuse("a processing instruction is refused")
    parser.SetParamEntityParsing(expat.XML_PARAM_ENTITY_PARSING_NEVER)
    try:
        parser.Parse(text, True)
    except expat.ExpatError as error:
        reason = expat.errors.messages.get(error.code, "malformed")
        raise InputError(f"{name}: line {error.lineno}: this is not well-formed XML ({reason})") from None
    return root[0]
