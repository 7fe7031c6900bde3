"""Reads any YAML text with ruamel.yaml, which writes the messages on malformed text, and writes YAML.

Aliases, tags, directives and duplicate keys are refused; a date is read as text. `yaml_io` imports this
module only when it is needed, since ruamel.yaml is slow to load and to read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from io import StringIO
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap
from ruamel.yaml.composer import Composer
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import AliasEvent
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.file_limits import MAX_DEPTH, MAX_YAML_VALUES, check_text, cut

MOST_NUMBER_CHARACTERS = 40
_INTEGER = re.compile(r"([-+]?)(?:0b([01]{1,64})|0o([0-7]{1,22})|0x([0-9a-fA-F]{1,16})|(\d{1,40}))", re.ASCII)
_BASES = (2, 8, 16, 10)


class _Composer(Composer):
    """Composes a bounded number and depth of nodes, and refuses aliases.

    Ten lines of nested aliases can expand to gigabytes, and no shipped file needs one.
    """

    values = 0
    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.parser.peek_event()
        line = event.start_mark.line + 1
        if isinstance(event, AliasEvent):
            raise InputError(f"line {line}: the YAML alias *{event.anchor} is refused; write the value out")
        self.values += 1
        if self.values > MAX_YAML_VALUES:
            raise InputError(
                f"line {line}: more than {MAX_YAML_VALUES:,} keys and values, the limit of a YAML file; "
                "write so many as JSON"
            )
        if self.depth > MAX_DEPTH:
            raise InputError(f"line {line}: nested too deeply, more than {MAX_DEPTH} levels")
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


def read_full_yaml(text: str) -> Any:
    """The data of a YAML 1.2 text. Raises InputError, with the line, for malformed or refused text."""
    check_text(text)
    if text.lstrip("\ufeff \r\n").startswith("%"):
        raise InputError("line 1: a directive (%YAML, %TAG) is refused; delete the line")
    yaml = YAML(typ="safe", pure=True)
    yaml.Composer = _Composer
    try:
        node = yaml.compose(text)
        return None if node is None else _plain(node)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}: " if mark is not None else ""
        problem = " ".join(str(error.problem or error.context or "malformed").split())
        raise InputError(f"{where}not valid YAML: {problem}") from None
    except YAMLError as error:
        raise InputError(f"not valid YAML: {' '.join(str(error).split())}") from None


def _plain(node: Node) -> Any:
    """A node as plain data; only the tags of JSON's types are accepted."""
    tag = str(node.tag).removeprefix("tag:yaml.org,2002:")
    if isinstance(node, ScalarNode):
        return _scalar(node, tag)
    if isinstance(node, MappingNode) and tag == "map":
        return dict(_pairs(node))
    if tag == "seq" and not isinstance(node, MappingNode):
        return [_plain(item) for item in node.value]
    raise _wrong(node, f"the tag {tag[:40]!r} is not known; leave tags out")


def _pairs(node: MappingNode) -> Iterator[tuple[Any, Any]]:
    seen = set()
    for key_node, value_node in node.value:
        key = _plain(key_node) if isinstance(key_node, ScalarNode) else None
        if isinstance(key, bool) or not isinstance(key, str | int):
            raise _wrong(key_node, "a key must be a text or a whole number; put quotes around it")
        if key in seen:
            raise _wrong(key_node, f"the duplicate key {cut(repr(key))}; keep one of them")
        seen.add(key)
        yield key, _plain(value_node)


def _scalar(node: ScalarNode, tag: str) -> Any:
    text = str(node.value)
    if tag in ("str", "timestamp", "value"):
        return text
    if tag == "null":
        return None
    if tag == "bool" and text.lower() in ("true", "false"):
        return text.lower() == "true"
    plain = text.replace("_", "")
    if tag == "int" and (match := _INTEGER.fullmatch(plain)):
        digits, base = next((d, b) for d, b in zip(match.groups()[1:], _BASES, strict=True) if d)
        return int(match[1] + digits, base)
    if tag == "float" and len(plain) <= MOST_NUMBER_CHARACTERS:
        special = plain.lower().lstrip("+-") in (".inf", ".nan")
        try:
            return float(plain.replace(".", "", 1) if special else plain)
        except ValueError:
            pass
    if tag in ("int", "float"):
        raise _wrong(
            node,
            f"{cut(repr(text))} is no number of at most {MOST_NUMBER_CHARACTERS} characters "
            "(16 if hexadecimal)",
        )
    raise _wrong(node, f"{cut(repr(text))} cannot have the tag {tag[:40]!r}; leave tags out")


def _wrong(node: Node, what: str) -> InputError:
    return InputError(f"line {node.start_mark.line + 1}: not valid YAML: {what}")


def write_yaml(data: dict[str, Any], width: int) -> str:
    """YAML text of plain data in its given key order, in lines of about `width` characters."""
    yaml = YAML(typ="rt", pure=True)
    yaml.width = width
    buffer = StringIO()
    yaml.dump(CommentedMap(data), buffer)
    return buffer.getvalue()
