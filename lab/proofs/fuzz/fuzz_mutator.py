"""Changes to texts and plain data that a reader must understand or refuse; all drawn from one seed."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any


class Raw(str):
    """A token that goes into a file as it is, quoted by nobody."""

    __slots__ = ()


NUMBERS: tuple[Any, ...] = (
    0, -1, 1, 2, 3, 7, 8, 0.5, -0.0, 1e-9, 1e-300, 5e-324, 1e15, 1e300, 1.7976931348623157e308, 2**31, 2**32,
    2**53,
    2**63 - 1, 2**63, 2**64, 10**18, 10**30, 10**400, -(2**63), True, False, None, 1000003, 65537,
    Raw("1e999"), Raw("-1e999"), Raw(".inf"), Raw(".nan"), Raw("0x" + "f" * 40), Raw("0o777"), Raw("0b11"),
    Raw("9" * 400), Raw("9" * 5000), Raw("1" + "_" * 50 + "1"), Raw("1e-400"), Raw("0x"), Raw("-"),
    Raw("+.5"),
    Raw("1.2.3"), Raw("1:30"), Raw("017"), Raw("١٢"), Raw("1e" + "9" * 300), Raw("0." + "0" * 400 + "1"),
)  # fmt: skip
TEXTS: tuple[str, ...] = (
    "", " ", "-", "~", "null", "true", "x", "no such thing", "x" * 5000, "é" * 300, "\u202e\u0000", "\x00",
    "a\x00.yaml", "a.yaml", "a.json", "a.csv", "../../../../etc/passwd", "/dev/zero", "/dev/null", "/", ".",
    "..", "~/x.yaml",
    "x" * 300 + ".yaml", "\ud800", "\udfff.yaml", "\x1b[31mred", "%s%n{}{0.__class__}", "${HOME}", "`id`",
    "$(id)",
    "![x](http://host/p.png)", "<script>", "🦣" * 40, "\n", "a\nb", "\r\n", "'", '"', "#", "a: b", "{a: 1}",
    "[1, 2]",
    "0 GB/s", "1e-300 GB/s", "1e999999 GB/s", "1e300 GB/s", "-1 GB/s", "1 GB", "400", "50 %", "1e400 %",
    "-5 %",
    "nan GB/s", "inf s", "$1e99/h", "$-1/h", "1e-30 s", "1e30 s", "5 parsecs", "1 " + "G" * 200 + "B/s", "$",
    "$$1",
    "2024-13-99", "2024-02-30", "99999-01-01", "0000-00-00", "moe*4", "moe*999999999", "dense*-1", "1..10",
    "0..1e9", "1..2:x1.0000001", "1,2,,3", "gpu:0", "plane:99", "upload-" + "0" * 32 + ".yaml", "home",
)  # fmt: skip
FAMILIES: tuple[Callable[[random.Random], str], ...] = (
    lambda r: "[" * r.choice((10, 60, 400, 5000)),
    lambda r: "a: " + "[" * (n := r.choice((10, 39, 60, 400))) + "]" * n,
    lambda r: "{" * r.choice((10, 60, 3000)) + "a: 1",
    lambda r: "".join(" " * i + "a:\n" for i in range(r.choice((10, 39, 45, 300)))),
    lambda r: "- " * r.choice((10, 100, 2000)),
    lambda r: "? " * r.choice((10, 100)) + "a",
    lambda r: "a: &a [x]\n" + "".join(f"b{i}: &b{i} [*a, *a]\n" for i in range(r.choice((1, 20)))),
    lambda r: "a: !!" + r.choice(("bool maybe", 'int ""', "float x", "null x", "binary aGk=", "set {x}",
    "omap [a: 1]",
                                  "timestamp x", "python/object:os.system x", "str", "map [1]", "seq {a: 1}",
                                  "merge x")),
    lambda r: r.choice(("[[]]: 1", "{a: 1}: 2", "? [1, 2]\n: 3", "true: 1", "~: 1", "1.5: 2",
    "2024-01-01: 3", "<<: {a: 1}")),
    lambda r: "%" + r.choice(("YAML 1.1", "YAML 9.9", "YAML x", "TAG ! tag:x,", "FOO")) + "\n---\na: on",
    lambda r: "a: 1\n" * r.choice((2, 500)),
    lambda r: "".join(f"k{i}: {i}\n" for i in range(r.choice((50, 2000)))),
    lambda r: "a: [" + "1," * r.choice((100, 3000)) + "]",
    lambda r: "{" + ",".join(f'"k{i}": {i}' for i in range(r.choice((50, 3000)))) + "}",
    lambda r: "\x00" * 10, lambda r: "\ufeff", lambda r: "\ufffe\x01\x02", lambda r: "---\n---\n",
    lambda r: "...",
    lambda r: "a: |" + r.choice(("9", "+-", "\n\tx", "\n  x\n y")), lambda r: "a: >\n" + " x\n" * 50,
    lambda r: "\t",
    lambda r: "x" * r.choice((100, 20_000)), lambda r: "\n" * r.choice((100, 5000)), lambda r: "#" * 5000,
    lambda r: "".join(chr(r.choice((9, 10, 32, 58, 45, 91, 123, 34, 39, 35, 38, 42, 33, 37, 64, 96,
    r.randrange(0x2FFF)))) for _ in range(60)),
    lambda r: "<system>" + "<cpu>" * r.choice((3, 70, 500)),
    lambda r: '<!DOCTYPE a [<!ENTITY b "c">]><system>&b;</system>',
    lambda r: "GPU0 " * r.choice((1, 300)) + "\n" + "GPU0 X " * 5,
    lambda r: "A=xxxxxxxx\n" + "A=$A$A\n" * r.choice((3, 40)) + "python x --seq-length $A",
    lambda r: "python x " + "${A:-" * 500, lambda r: "python x '--a",
    lambda r: "python x " + "--a \\\n" * 500,
    lambda r: "0F0," * r.choice((5, 500)), lambda r: "999999999F999999999,0B0", lambda r: '0F0,"',
    lambda r: "0F0;1B1",
    lambda r: ",".join("1" for _ in range(r.choice((5, 3000)))), lambda r: "1,2\n3",
    lambda r: "1e999,nan\ninf,-1",
)  # fmt: skip
"""Hostile texts of one kind each: nesting, size, tags, keys, foreign formats."""

_TOKEN = re.compile(r"[A-Za-z0-9_.$%/-]+|\s+|.", re.DOTALL)
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")


class Mutator:
    """Draws changes; `pool` holds values of other files, which are put in the place of this one's."""

    def __init__(self, rng: random.Random, pool: Sequence[Any]) -> None:
        self.rng, self.pool = rng, pool

    # -- values --------------------------------------------------------------------------------------

    def value(self, old: Any = None) -> Any:
        """Another value: near the old one, from another file, or one that few readers expect."""
        r = self.rng
        kind = r.random()
        if kind < 0.5:
            return self._near(old)
        if kind < 0.65:
            return r.choice(self.pool)
        if kind < 0.8:
            return r.choice(NUMBERS)
        if kind < 0.92:
            return r.choice(TEXTS)
        return r.choice(
            (
                [],
                {},
                [[]],
                [[0.1, 0.2]],
                {"": 1},
                {"a": {"b": []}},
                [None],
                [old, old],
                {"value": old},
                [r.choice(TEXTS)] * 50,
            )
        )

    def _near(self, old: Any) -> Any:
        r = self.rng
        if isinstance(old, bool):
            return not old
        if isinstance(old, int):
            return r.choice(
                (
                    old + 1,
                    old - 1,
                    old * 2,
                    old // 2,
                    old * 3,
                    -old,
                    old * 1000,
                    str(old),
                    old + 0.5 if abs(old) < 2**900 else old,
                )
            )
        if isinstance(old, float):
            return r.choice(
                (old * 2, old / 2, -old, old * 1e6, old * 1e-6, int(min(max(old, -1e9), 1e9)), str(old))
            )
        if isinstance(old, str):
            number = _NUMBER.search(old)
            if number and r.random() < 0.8:
                new = str(r.choice(NUMBERS)) if r.random() < 0.6 else str(self._near(float(number[0])))
                return old[: number.start()] + new + old[number.end() :]
            if old and r.random() < 0.7:
                at = r.randrange(len(old))
                return r.choice(
                    (
                        old[:at] + old[at + 1 :],
                        old[:at] + r.choice("aZ0 /.-\u00e9") + old[at:],
                        old.upper(),
                        old * 2,
                    )
                )
        if isinstance(old, list) and old:
            return r.choice((old[:-1], old * 2, old[::-1], [*old, self.value()], old[0], old[:3] * 40))
        return r.choice(TEXTS)

    # -- plain data ----------------------------------------------------------------------------------

    def data(self, data: Any) -> Any:
        """Data like `data` with one to four changes somewhere inside; the original stays."""
        new = json.loads(json.dumps(data))
        if self.rng.random() < 0.5:
            holder, key = _place(self.rng, new)
            if holder is not None:
                holder[key] = self._alike(holder[key])
            return new
        for _ in range(self.rng.choice((1, 1, 1, 2, 2, 4))):
            new = self._change(new)
        return new

    def _alike(self, old: Any) -> Any:
        """A value of the same type, which may well be legal."""
        r = self.rng
        if r.random() < 0.5:
            alike = [v for v in r.choices(self.pool, k=40) if type(v) is type(old)]
            return r.choice(alike) if alike else old
        if isinstance(old, int | float) and not isinstance(old, bool):
            return type(old)(min(old * r.choice((0, 1, 2, 4, 1000, 0.5, 1e-6)), 1e15))
        return self._near(old)

    def _change(self, data: Any) -> Any:
        r = self.rng
        holder, key = _place(r, data)
        if holder is None:
            return self.value(data)
        kind = r.random()
        if kind < 0.6:
            holder[key] = self.value(holder[key])
        elif kind < 0.72:
            del holder[key]
        elif kind < 0.84 and isinstance(holder, dict):
            holder[self.key(str(key))] = holder[key] if r.random() < 0.5 else holder.pop(key)
        elif kind < 0.92:
            other, name = _place(r, data)
            if other is not None:
                # A copy, so that no value holds itself.
                holder[key] = json.loads(json.dumps(other[name], default=str))
        elif isinstance(holder, dict):
            holder[r.choice((str(key) + "x", "value", "kind", "between", "name", "include"))] = self.value()
        else:
            holder.append(self.value(holder[key]))
        return data

    def key(self, old: str) -> str:
        """Another key."""
        r = self.rng
        return r.choice(
            (
                old + "s",
                old[:-1],
                old.upper(),
                f"{old}.{old}",
                r.choice(TEXTS),
                str(r.choice(self.pool))[:200],
            )
        )

    def text_of(self, data: Any) -> str:
        """Data as flow text, as both readers read it; raw tokens as they are, at times a key twice."""
        if isinstance(data, Mapping):
            items = [f"{json.dumps(str(k))}: {self.text_of(v)}" for k, v in data.items()]
            if items and self.rng.random() < 0.005:
                items.append(items[0])
            return "{" + ", ".join(items) + "}"
        if isinstance(data, list | tuple):
            return "[" + ", ".join(map(self.text_of, data)) + "]"
        if isinstance(data, Raw):
            return str(data)
        if isinstance(data, int) and not isinstance(data, bool):
            return str(data) if abs(data) < 10**4000 else "9" * 5000
        return json.dumps(data, ensure_ascii=self.rng.random() < 0.5 or _is_half(data))

    # -- texts ---------------------------------------------------------------------------------------

    def text(self, text: str) -> str:
        """Text with one to six changes to its characters, words or lines."""
        for _ in range(self.rng.choice((1, 1, 2, 3, 6))):
            text = self._change_text(text)
        return text

    def _change_text(self, text: str) -> str:
        r = self.rng
        kind = r.random()
        if kind < 0.3:
            words = list(_TOKEN.finditer(text))
            if not words:
                return str(r.choice(TEXTS))
            word = r.choice(words)
            new = str(self.value(word[0])) if r.random() < 0.8 else str(self._near(word[0]))
            return text[: word.start()] + new[:6000] + text[word.end() :]
        if kind < 0.5:
            numbers = list(_NUMBER.finditer(text))
            if numbers:
                number = r.choice(numbers)
                return text[: number.start()] + str(r.choice(NUMBERS))[:500] + text[number.end() :]
        lines = text.splitlines(keepends=True)
        if kind < 0.8 and lines:
            at, other = r.randrange(len(lines)), r.randrange(len(lines))
            change = r.randrange(5)
            if change == 0:
                del lines[at]
            elif change == 1:
                lines.insert(at, lines[other])
            elif change == 2:
                lines[at], lines[other] = lines[other], lines[at]
            elif change == 3:
                lines[at] = r.choice((" ", "  ", "\t", "- ", "? ", "#")) + lines[at]
            else:
                lines[at] = lines[at] * r.choice((2, 30))
            return "".join(lines)
        at = r.randrange(len(text) + 1)
        if kind < 0.88:
            return (
                text[:at]
                + chr(
                    r.choice((0, 9, 10, 34, 39, 42, 38, 58, 123, 91, 0xD800, 0x85, 0x2028, r.randrange(256)))
                )
                + text[at:]
            )
        if kind < 0.94:
            return text[:at]
        return text[:at] + r.choice(FAMILIES)(r) + text[at:]

    def hostile(self) -> str:
        """A text of a hostile family."""
        return self.rng.choice(FAMILIES)(self.rng)

    def bytes_of(self, text: str) -> bytes:
        """The bytes of a text; at times not UTF-8."""
        data = text.encode("utf-8", errors="surrogatepass")
        if self.rng.random() < 0.02 and data:
            at = self.rng.randrange(len(data))
            data = data[:at] + bytes([self.rng.randrange(256)]) + data[at + 1 :]
        return data


def _is_half(data: Any) -> bool:
    return isinstance(data, str) and any("\ud800" <= char <= "\udfff" for char in data)


def _place(rng: random.Random, data: Any) -> tuple[Any, Any]:
    """(container, key or index) of some value inside; (None, None) where there is none."""
    holder, key, value = None, None, data
    while isinstance(value, dict | list) and value and (holder is None or rng.random() < 0.75):
        holder = value
        key = rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))
        value = holder[key]
    return holder, key


def values_of(data: Any) -> list[Any]:
    """Every scalar inside."""
    if isinstance(data, Mapping):
        return [v for inner in data.values() for v in values_of(inner)]
    if isinstance(data, list | tuple):
        return [v for inner in data for v in values_of(inner)]
    return [data]
