"""Links that carry uploaded files: they open on a server without them, and nothing hostile passes."""

from __future__ import annotations

import json
import zlib
from base64 import urlsafe_b64encode
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("streamlit", reason="streamlit is not installed")

from streamlit.testing import v1 as testing

from moesim.app import pages, scenario_links, state, uploads
from moesim.hwmodels.errors import InputError

CONFIG = Path(__file__).resolve().parents[1] / "golden" / "models" / "qwen3-30b-a3b.json"
QWEN = ("parallel.pp=4", "parallel.ep=8", "stages={}", "recompute=none")


@pytest.fixture
def servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Moves this process to the upload folder of another server."""

    def move(name: str) -> Path:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        monkeypatch.setenv("MOESIM_READ_BELOW", str(folder))
        monkeypatch.setattr(uploads, "folder", lambda: folder)
        return folder

    return move


def packed(data: object) -> str:
    """A text as `pack` writes it, of any content."""
    return urlsafe_b64encode(zlib.compress(json.dumps(data).encode(), 9)).decode().rstrip("=")


def test_a_link_with_an_uploaded_model_opens_on_another_server(servers: Any) -> None:
    here = servers("here")
    token = uploads.accept("model", "my-qwen.json", CONFIG.read_bytes()).token
    texts = (*QWEN, f"model={token}")
    text = scenario_links.pack(pages.HOME, texts)
    assert text is not None and len(text) < 2_000
    assert scenario_links.parameters(pages.HOME, texts) == {scenario_links.PARAMETER: text}
    assert scenario_links.only_here(pages.HOME, texts) is None
    held = (here / token).read_bytes()
    there = servers("there")
    assert not list(there.iterdir())
    assert scenario_links.unpack(text) == (pages.HOME, texts)
    assert (there / token).read_bytes() == held
    assert scenario_links.read(scenario_links.written(pages.HOME, texts)) == (pages.HOME, texts)


def test_what_an_uploaded_scenario_names_comes_along(servers: Any) -> None:
    servers("here")
    token = uploads.accept("model", "my-qwen.json", CONFIG.read_bytes()).token
    kept = uploads.keep(uploads.scenario_of(pages.HOME, (*QWEN, f"model={token}")))
    text = scenario_links.pack(kept, ())
    assert text is not None
    there = servers("there")
    assert scenario_links.unpack(text) == (kept, ())
    assert {path.name for path in there.iterdir()} == {kept, token}
    assert uploads.scenario_of(kept).shape.name == "my-qwen"


def test_nothing_is_packed_without_uploads_or_where_it_would_be_long(servers: Any) -> None:
    servers("here")
    assert scenario_links.pack(pages.HOME, ("parallel.ep=32",)) is None
    noise = json.dumps({"name": "noise", "text": [hash((n, "x")) for n in range(2_000)]}).encode()
    path = uploads._store(noise, ".json")
    assert scenario_links.pack(pages.HOME, (f"model={path.name}",)) is None
    told = scenario_links.only_here(pages.HOME, (f"model={path.name}",))
    assert told is not None and "this server only" in told


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "was cut"),
        ("not compressed", "not compressed"),
        ("é" * 20, "not compressed"),
        (packed([1, 2]), "no JSON object"),
        (packed({"preset": 1, "set": [], "files": {}}), "does not hold"),
        (packed({"preset": "x", "set": [1], "files": {}}), "not text"),
        (packed({"preset": "x", "set": [], "files": {"../../etc/passwd": "x"}}), "not '../../etc/passwd'"),
        (packed({"preset": "x", "set": [], "files": {f"upload-{'0' * 32}.yaml": "x"}}), "as it says"),
        (packed("[" * 100_000), "no JSON object"),
        ("A" * (scenario_links.MOST_CHARACTERS + 1), "more than"),
        (urlsafe_b64encode(zlib.compress(b"x" * 5_000_000, 9)).decode(), "unpacks to more than"),
        (packed({"preset": "x", "set": [], "files": {}})[:-8], "cut"),
    ],
)
def test_a_damaged_or_hostile_link_is_refused_in_one_sentence(text: str, says: str, servers: Any) -> None:
    folder = servers("here")
    with pytest.raises(InputError, match=says):
        scenario_links.unpack(text)
    assert not list(folder.iterdir()), "a file of a refused link was stored"


def test_the_form_stays_where_a_link_cannot_be_read() -> None:
    from streamlit.testing import v1 as testing

    app = testing.AppTest.from_string(
        "from moesim.app import state\nfrom moesim.app.views import scenario_header\nstate.synchronise()\n"
        "scenario_header.show()\nstate.publish()",
        default_timeout=60,
    )
    app.query_params["packed"] = "damaged"
    app.run()
    assert not app.exception
    assert any("packed" in error.value for error in app.error)
    assert "chip" not in " ".join(str(button.key) for button in app.button)
    app.run()
    assert any("packed" in error.value for error in app.error), (
        "the reason stays until something else is opened"
    )


def test_an_address_with_many_changes_is_not_counted_with_its_files(servers: Any) -> None:
    servers("here")
    token = uploads.accept("model", "my-qwen.json", CONFIG.read_bytes()).token
    assert not scenario_links.is_long(pages.HOME, (*QWEN, f"model={token}"))
    assert scenario_links.is_long(pages.HOME, tuple(f"parallel.ep={n}" for n in range(200)))
    assert state.MOST_NAME < scenario_links.MOST_LINK_CHARACTERS


HALF = json.loads(r'"\ud800"')
"""Half of a pair of characters, which JSON can spell and no file or address can hold."""


@pytest.mark.parametrize(
    "data",
    [
        {"preset": HALF, "set": [], "files": {}},
        {"preset": pages.HOME, "set": [f"name={HALF}"], "files": {}},
        {"preset": pages.HOME, "set": [], "files": {"upload-" + "0" * 32 + ".yaml": HALF}},
        {"preset": pages.HOME, "set": [], "files": {HALF: "text"}},
    ],
)
def test_half_of_a_pair_of_characters_is_refused_in_a_packed_link(servers: Any, data: object) -> None:
    folder = servers("here")
    with pytest.raises(InputError, match=r"packed holds what no scenario can: .*surrogate"):
        scenario_links.unpack(packed(data))
    assert not list(folder.iterdir())


def test_half_of_a_pair_of_characters_is_refused_in_a_written_scenario_and_a_field() -> None:
    with pytest.raises(InputError, match="surrogate"):
        scenario_links.read(json.dumps([pages.HOME, f"name={HALF}"]))
    script = (
        "import streamlit as st\nfrom moesim.app import forms\n"
        r"""forms.read(['whole="a"', 'half="\ud800"', 'inside=[{"a": "\ud800"}]', 'large=1e999'])"""
        "\nst.write(sorted(forms._fields()))"
    )
    app = testing.AppTest.from_string(script).run()
    assert not app.exception and app.json[0].value == '["whole"]'
