"""docs/api.md lists every public name with a sentence, and has a directive for each."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType

import pytest

import moesim

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def writer() -> ModuleType:
    return importlib.import_module("lab.writers.api_page")


def test_every_public_name_has_its_place_on_the_page(writer: ModuleType) -> None:
    listed = writer.names()
    assert len(listed) == len(set(listed))
    assert set(listed) == set(moesim.__all__) - {"__version__"}


def test_the_page_is_current(writer: ModuleType) -> None:
    text = (ROOT / "docs" / "api.md").read_text("utf-8")
    assert text == writer.page(), "run: python -m lab.writers.api_page"
    assert re.findall(r"^::: moesim\.(\w+)$", text, re.MULTILINE) == writer.names()


def test_every_public_name_has_a_sentence(writer: ModuleType) -> None:
    for name in writer.names():
        sentence = writer.sentence(name)
        assert 15 < len(sentence) < 200 and sentence[0].isupper() and sentence.endswith("."), name


def test_the_page_is_linked() -> None:
    assert "api.md" in (ROOT / "mkdocs.yml").read_text("utf-8")
    assert "(docs/api.md)" in (ROOT / "README.md").read_text("utf-8")
