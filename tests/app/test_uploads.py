"""Everything of a visitor's is refused in one sentence or kept under a name made from its content."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moesim.app import uploads
from moesim.hwmodels.calibration import PROFILE_DIRECTORY
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.files import READ_BELOW
from moesim.simulator.model.catalogue import load_model
from moesim.simulator.predict.step import prepare
from moesim.simulator.scenario import Scenario

GOLDEN = Path(__file__).parents[1] / "golden"
SMALL = (GOLDEN / "scenario-small.yaml").read_text("utf-8")
HOME = "deepseek-v3-2048xh800"
CONFIG: dict[str, Any] = {
    "model_type": "mixtral", "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 4096,
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "num_local_experts": 8,
    "num_experts_per_tok": 2, "vocab_size": 1000, "tie_word_embeddings": False, "sliding_window": None,
}  # fmt: skip


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A server's folder for uploads; everything else is closed."""
    folder = tmp_path / "uploads"
    folder.mkdir()
    monkeypatch.setenv(READ_BELOW, str(folder))
    return folder


def refused(kind: str, name: str, data: bytes, *words: str, **options: Any) -> None:
    """One sentence with these words, no path of the server in it, nothing kept."""
    with pytest.raises(InputError) as error:
        uploads.accept(kind, name, data, **options)
    text = str(error.value)
    assert "\n" not in text and str(uploads.folder()) not in text and "upload-" not in text, text
    for word in words:
        assert word in text, text
    assert not list(uploads.folder().iterdir())


# -- what is fine -----------------------------------------------------------------------------------------


def test_a_scenario_is_kept_under_its_content_and_read_back() -> None:
    kept = uploads.accept("scenario", "../../mine.yaml", SMALL.encode())
    assert kept.name == "mine.yaml" and uploads.TOKEN.fullmatch(kept.token)
    assert uploads.accept("scenario", "other.yaml", SMALL.encode()).token == kept.token
    again = uploads.scenario_of(kept.token, ["seed=7"])
    assert isinstance(kept.content, Scenario)
    assert again.seed == 7 and again.model_dump(exclude={"seed"}) == kept.content.model_dump(exclude={"seed"})
    assert prepare(again).shape.name


def test_gzip_is_undone() -> None:
    plain = uploads.accept("scenario", "mine.yaml", SMALL.encode())
    assert uploads.accept("scenario", "mine.yaml.gz", gzip.compress(SMALL.encode())).token == plain.token


def test_a_model_gets_the_visitors_name_and_works_in_a_preset() -> None:
    config = {**CONFIG, "_name_or_path": "/etc/passwd"}
    kept = uploads.accept("model", "tiny-moe.json", json.dumps(config).encode())
    text = uploads.path_of(kept.token).read_text("utf-8")
    assert "name: tiny-moe" in text and "/etc/passwd" not in text and "upload-" not in text
    scenario = uploads.scenario_of(HOME, [f"model={kept.token}"])
    assert isinstance(scenario.model, str) and load_model(scenario.path(scenario.model)).name == "tiny-moe"


def test_a_profile_with_shipped_includes_is_read() -> None:
    text = (PROFILE_DIRECTORY / "h800-published.yaml").read_text("utf-8")
    kept = uploads.accept("profile", "mine.yaml", text.encode())
    assert uploads.profile_of(kept.token).name == uploads.profile_of("h800-published").name
    assert str(uploads.scenario_of(HOME, [f"profile={kept.token}"]).profile).endswith(kept.token)


def test_a_topology_becomes_a_cluster_that_a_scenario_can_name() -> None:
    edges = "\n".join(f"gpu:{i} switch:0 50GB/s 1us" for i in range(8))
    kept = uploads.accept("topology", "machine.txt", edges.encode(), like="hgx-h100")
    scenario = uploads.scenario_of("deepseek-v3-trace-pair", [f"cluster={kept.token}", "profile=h100-layers"])
    assert scenario.machine.n_gpus == 8


def test_histograms_are_read_in_each_format() -> None:
    counts = np.arange(1, 9, dtype=np.int64).reshape(2, 4)
    buffer = io.BytesIO()
    np.save(buffer, counts)
    tokens = {
        uploads.accept("histogram", name, data).token
        for name, data in (
            ("load.csv", b"1,2,3,4\n5,6,7,8\n"),
            ("load.npy", buffer.getvalue()),
            ("load.json", json.dumps({"counts": counts.tolist()}).encode()),
        )
    }
    assert len(tokens) == 3


def test_quantities_and_prose_with_slashes_are_no_paths() -> None:
    scenario = uploads.scenario_of(
        HOME, ["cluster.node.nic_bandwidth=100 Gb/s", "description=see https://example.org/a.yaml"]
    )
    assert scenario.machine.node.nic_bandwidth is not None


def test_the_oldest_uploads_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "MAX_KEPT_BYTES", 40)
    first = uploads.accept("histogram", "a.csv", b"1,2,3,4,5,6,7,8,9,10\n").token
    os.utime(uploads.path_of(first), (1, 1))
    second = uploads.accept("histogram", "b.csv", b"2,2,3,4,5,6,7,8,9,10\n").token
    assert uploads.path_of(second).is_file()
    with pytest.raises(InputError, match="upload it again"):
        uploads.path_of(first)


# -- hostile files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", sorted(uploads.ENDINGS))
def test_a_huge_file_is_refused(kind: str) -> None:
    size = uploads.MAX_BYTES.get(kind, uploads.MAX_BYTES_HISTOGRAM) + 1
    refused(kind, f"huge{uploads.ENDINGS[kind][0]}", b"1" * size, "larger than the limit")


BOMB = gzip.compress(b"\0" * 50_000_000, 9)


@pytest.mark.parametrize("kind", sorted(uploads.ENDINGS))
def test_a_gzip_bomb_is_refused_before_it_is_unpacked(kind: str) -> None:
    assert len(BOMB) < 1_000_000
    refused(kind, f"bomb{uploads.ENDINGS[kind][0]}.gz", BOMB, "unpacks to more than the limit")


@pytest.mark.parametrize("data", [b"not gzip", gzip.compress(SMALL.encode())[:-20]])
def test_a_broken_gzip_file_is_refused(data: bytes) -> None:
    refused("scenario", "a.yaml.gz", data, "gzip")


def test_an_alias_bomb_is_refused() -> None:
    lines = ["a: &a [x, x, x, x, x, x, x, x, x]"]
    lines += [f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]" for a, b in zip("abcdefgh", "bcdefghi", strict=True)]
    for kind in ("scenario", "model", "profile"):
        refused(kind, "bomb.yaml", "\n".join(lines).encode(), "alias")


@pytest.mark.parametrize(
    "head",
    [
        '<!DOCTYPE s [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;">]>',
        '<!DOCTYPE s [<!ENTITY x SYSTEM "file:///etc/passwd">]>',
        '<?xml-stylesheet href="file:///etc/passwd"?>',
    ],
)
def test_xml_entities_are_refused(head: str) -> None:
    refused("topology", "t.xml", f"{head}<system></system>".encode(), "refused", like="hgx-h100")


@pytest.mark.parametrize("kind", sorted(uploads.ENDINGS))
@pytest.mark.parametrize("data", [b"", b"\0\1\2\3", b"\xff\xfe\xfa" * 10, b"[1, 2", b"- - - -", b"null"])
def test_what_is_not_of_its_kind_is_refused(kind: str, data: bytes) -> None:
    options = {"like": "hgx-h100"} if kind == "topology" else {}
    refused(kind, f"x{uploads.ENDINGS[kind][0]}", data, "x.", **options)


@pytest.mark.parametrize("name", ["x.pkl", "x.exe", "x", "", "x.yaml.pkl", ".yaml", "a\0.html"])
def test_another_ending_is_refused(name: str) -> None:
    refused("scenario", name, SMALL.encode(), "ends in")


@pytest.mark.parametrize("kind", ["scenario", "model", "profile"])
@pytest.mark.parametrize("ending", ["json", "yaml"])
def test_deep_nesting_is_refused(kind: str, ending: str) -> None:
    refused(kind, f"deep.{ending}", b"[" * 50_000, "deep.")


def test_pickled_arrays_are_refused(tmp_path: Path) -> None:
    class Bad:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.write_text, (tmp_path / "pwned", "x"))

    buffer = io.BytesIO()
    np.save(buffer, np.array([Bad()], dtype=object), allow_pickle=True)
    refused("histogram", "x.npy", buffer.getvalue(), "not a NumPy array file")
    refused("histogram", "x.npy", pickle.dumps(Bad()), "not a NumPy array file")
    assert not (tmp_path / "pwned").exists()


# -- paths of the server ----------------------------------------------------------------------------------

PATHS = [
    "/etc/passwd", "../../etc/passwd", "../secret.yaml", "secret.yaml", "~/.ssh/id_rsa", "C:\\secret",
    "\\\\server\\share\\x.json", "file:///etc/passwd", "secret.CSV", "./x", "..", "a/b",
]  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("key", ["model", "cluster", "profile", "schedule", "run", "precision"])
def test_no_path_of_an_uploaded_scenario_is_read(key: str, path: str, tmp_path: Path) -> None:
    (tmp_path / "secret.yaml").write_text("name: TOPSECRET\n")
    lines = [line for line in SMALL.splitlines() if not line.startswith(f"{key}:")]
    body = "\n".join([*lines, f"{key}: {json.dumps(path)}"])
    body = body if key != "run" else "\n".join(x for x in body.splitlines() if not x.startswith("  tokens"))
    refused("scenario", "x.yaml", body.encode(), "no file of the server is read")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "key", ["model", "cluster", "cluster.node", "run.checkpoint.storage", "communication.overlap"]
)
def test_no_path_of_a_link_or_text_box_is_read(key: str, path: str) -> None:
    with pytest.raises(InputError, match="no file of the server is read"):
        uploads.scenario_of(HOME, [f"{key}={json.dumps(path)}"])


@pytest.mark.parametrize(
    "override",
    [
        "routing.load={kind: histogram, file: /etc/passwd}",
        "run={tokens: 1e12, phases: [{name: a, tokens: 1e9, override: ['profile=/etc/x.yaml']}]}",
        "run={tokens: 1e12, checkpoint: {interval: 5 min, storage: ../x.yaml}}",
    ],
)
def test_no_path_deep_inside_a_value_is_read(override: str) -> None:
    with pytest.raises(InputError, match="no file of the server is read"):
        uploads.scenario_of(HOME, [override])


def test_no_include_of_an_uploaded_profile_is_read() -> None:
    text = (PROFILE_DIRECTORY / "h800-published.yaml").read_text("utf-8")
    head = text.split("include:")[0]
    for wrong in ("[../../etc/x.yaml]", "[unheard-of]", "[{}]", "[[]]"):
        refused("profile", "p.yaml", f"{head}\ninclude: {wrong}\n".encode(), "not a shipped profile")
    for wrong in ("7", "/etc/x.yaml", "{a: b}"):
        refused("profile", "p.yaml", f"{head}\ninclude: {wrong}\n".encode(), "include")


@pytest.mark.parametrize("name", ["/etc/passwd", "../x.yaml", "upload-0.yaml", f"upload-{'0' * 32}.yaml"])
def test_only_presets_and_uploads_are_scenarios(name: str) -> None:
    with pytest.raises(InputError):
        uploads.scenario_of(name)
    with pytest.raises(InputError):
        uploads.profile_of(name)


def test_the_second_line_of_defence_holds_by_itself(tmp_path: Path) -> None:
    """Whatever slips through the names is stopped where files are opened."""
    secret = tmp_path / "secret.yaml"
    secret.write_text("name: TOPSECRET\n")
    shutil.copy(GOLDEN / "scenario-small.yaml", tmp_path / "small.yaml")
    import moesim
    from moesim.hwmodels import load_cluster
    from moesim.hwmodels.calibration import load_profile
    from moesim.hwmodels.importers import import_topology
    from moesim.simulator.layout.popularity import read_counts

    for read in (
        lambda: moesim.load(str(tmp_path / "small.yaml")),
        lambda: load_cluster(str(secret)),
        lambda: load_profile(str(secret)),
        lambda: load_model(str(secret)),
        lambda: load_model("/etc/passwd"),
        lambda: read_counts(tmp_path / "x.csv"),
        lambda: import_topology(secret, "hgx-h100"),
        lambda: prepare(moesim.load(HOME, f"schedule={tmp_path}/x.csv")),
    ):
        with pytest.raises(InputError, match="not read by path"):
            read()
    assert moesim.load(HOME).name == HOME  # what ships is read as before


# -- several at once --------------------------------------------------------------------------------------


def test_files_that_another_process_removes_meanwhile_are_no_error(
    own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "MAX_KEPT_BYTES", 1)
    for number in range(5):
        (own_folder / f"upload-{number}.yaml").write_text("old")
    stat = Path.stat

    def removed_first(path: Path, **how: bool) -> os.stat_result:
        if path.name == "upload-3.yaml":
            path.unlink(missing_ok=True)
        return stat(path, **how)

    monkeypatch.setattr(Path, "stat", removed_first)
    kept = uploads.accept("scenario", "mine.yaml", SMALL.encode())
    assert [path.name for path in own_folder.iterdir()] == [kept.token]


def test_an_upload_takes_nothing_from_an_equal_one_that_is_read_meanwhile(
    own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, read = json.dumps(CONFIG).encode(), uploads._READERS["model"]
    first_is_done, second_reads = threading.Event(), threading.Event()
    tokens: list[str] = []

    def second() -> None:
        tokens.append(uploads.accept("model", "equal.json", data).token)

    other = threading.Thread(target=second)

    def read_in_turn(path: Path) -> Any:
        if threading.current_thread() is other:
            second_reads.set()
            assert first_is_done.wait(20.0)
        else:
            other.start()
            assert second_reads.wait(20.0)
        return read(path)

    monkeypatch.setattr(uploads, "_READERS", {**uploads._READERS, "model": read_in_turn})
    tokens.append(uploads.accept("model", "equal.json", data).token)
    first_is_done.set()
    other.join()
    assert len(tokens) == 2 and len(set(tokens)) == 1
    assert [path.name for path in own_folder.iterdir()] == tokens[:1]


def test_a_full_disk_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**_: object) -> tuple[int, str]:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.mkstemp", full)
    refused("scenario", "mine.yaml", SMALL.encode(), "cannot keep the file: No space left on device")


def test_a_name_that_no_text_can_hold_is_shown_without_it() -> None:
    assert uploads.accept("scenario", "a\ud800.yaml", SMALL.encode()).name == "a?.yaml"


@pytest.mark.parametrize(
    ("kind", "name", "text", "says"),
    [
        (
            "scenario",
            "config.json",
            '{"model_type": "qwen3_moe", "hidden_size": 2048}',
            "a model's config.json",
        ),
        ("model", "s.yaml", "name: x\nmodel: deepseek-v3\nparallel: {pp: 16}\n", "a scenario of moesim"),
        ("model", "m.json", '{"weight_map": {"a": "b"}}', "an index of weights"),
        ("profile", "t.json", '{"traceEvents": []}', "a profiler's trace"),
        ("scenario", "run.sh", "#!/bin/bash\ntorchrun --nnodes 2 train.py\n", "a launch script"),
    ],
)
def test_a_file_of_another_kind_is_named_for_what_it_is(kind: str, name: str, text: str, says: str) -> None:
    with pytest.raises(InputError, match=says) as refused:
        uploads.accept(kind, name, text.encode())
    assert len(str(refused.value)) < 300, "no list of internal keys"
