"""The server process: nothing left to import, headers, a broken page in the log, and no orphan."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("streamlit", reason="the dashboard extra is not installed")

from app_sessions import run_apart

from moesim.app import server_command, server_process

ROOT = Path(__file__).parents[2]

WAIT_S = 120.0

STARTER = """
import sys, time
from moesim.app import server_command

BROKEN = "from moesim.app.views import evidence; evidence.show = lambda: {}['the cause']; "
SERVE = "import sys; from moesim.app import server_process; server_process.serve(int(sys.argv[1]))"
option = server_command.command(0)[1]
server_command.command = lambda port: [sys.executable, option, "-c", BROKEN + SERVE, str(port)]
port = server_command.chosen_port(0)
with server_command.running(port) as process:
    assert server_command.wait_until_healthy(process, port)
    print(process.pid, port, flush=True)
    time.sleep(600)
"""
"""What `moesim app` does, with one page that fails."""

HOSTILE = (
    "json",
    "multiprocessing",
    "numba",
    "numpy",
    "pandas",
    "plotly",
    "pydantic",
    "simpy",
    "streamlit",
    "yaml",
)
"""Modules that lie in the folder where the server starts, of which none may run."""


class Started(NamedTuple):
    """A process that started a server, the server, its port and what both wrote to stderr."""

    parent: subprocess.Popen[str]
    pid: int
    port: int
    log: Path


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    folder = tmp_path_factory.mktemp("server")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TMPDIR": str(folder)}
    scenarios = folder / "scenarios"
    scenarios.mkdir()
    for name in HOSTILE:
        (scenarios / f"{name}.py").write_text(f"open({str(folder / 'marks')!r}, 'a').write('{name} ')\n")
    with (folder / "log").open("w") as log:
        parent = subprocess.Popen(
            [sys.executable, "-P", "-c", STARTER],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environment,
            cwd=scenarios,
        )
    try:
        assert parent.stdout is not None
        said = parent.stdout.readline().split()
        assert said, (folder / "log").read_text()
        yield Started(parent, int(said[0]), int(said[1]), folder / "log")
    finally:
        parent.kill()
        parent.wait()


@pytest.mark.long
def test_nothing_in_the_folder_where_it_starts_runs(started: Started) -> None:
    assert len(list((started.log.parent / "scenarios").iterdir())) == len(HOSTILE)
    assert not (started.log.parent / "marks").exists()


def test_every_answer_carries_the_headers(started: Started) -> None:
    for path in ("/", "/_stcore/health", "/result", "/_stcore/upload_file/a/b"):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{started.port}{path}") as answer:
                found = answer.headers
        except urllib.error.HTTPError as refused:
            found = refused.headers
        policy = found["Content-Security-Policy"]
        assert "default-src 'self'" in policy and "frame-ancestors 'self'" in policy
        assert "unsafe-eval" not in policy and "script-src 'self' 'sha256-" in policy
        assert found["X-Frame-Options"] == "SAMEORIGIN" and found["X-Content-Type-Options"] == "nosniff"
        assert found["Referrer-Policy"] == "no-referrer"


def test_inline_scripts_are_named_by_their_hash() -> None:
    policy = server_process.content_security_policy("<script>a()</script><script src='x'></script>")
    assert policy.count("sha256-") == 1
    assert "'sha256-qVpDBgj7bpq5hMAcGp3AOc79J3Y1Z4HvySTwKrWDoy4='" in policy


def test_a_page_that_fails_says_one_sentence_and_the_log_has_the_traceback(started: Started) -> None:
    clients = importlib.import_module("lab.benchmarks.streamlit_client")

    async def visit() -> Any:
        client = clients.Client(server_command.url(started.port), "evidence")
        await client.open()
        await client.close()
        return client.errors

    (message,) = run_apart(visit())
    assert message.startswith("This page could not be drawn (KeyError)") and "the cause" not in message
    log = started.log.read_text()
    assert "Traceback" in log and "KeyError: 'the cause'" in log


@pytest.mark.long
def test_a_timer_of_the_page_before_does_not_empty_the_page_that_was_opened(started: Started) -> None:
    clients = importlib.import_module("lab.benchmarks.streamlit_client")
    base = server_command.url(started.port)

    async def visit() -> None:
        before = clients.Client(base, "calibration")
        await before.open()
        left = before.drawn
        await before.close()
        client = clients.Client(base, "result", "preset=deepseek-v3-2048xh800&set=communication.sms%3D17")
        await client.open()
        drawn = client.drawn
        assert client.timers and left != drawn, "nothing on this page redraws itself"
        client.runs.clear()
        client.metrics.clear()
        await client.tick(left)
        assert client.runs[0] == left, "the browser now believes to be on the page before"
        assert client.runs[-1] == drawn and "Step time" in client.metrics, "only a whole page has numbers"
        await client.close()

    run_apart(visit())


@pytest.mark.long
def test_a_timer_that_fires_while_another_page_is_drawn_does_not_empty_it(started: Started) -> None:
    clients = importlib.import_module("lab.benchmarks.streamlit_client")
    base = server_command.url(started.port)

    async def visit() -> None:
        other = clients.Client(base, "calibration")
        await other.open()
        await other.close()
        query = "preset=deepseek-v3-2048xh800&set=communication.sms%3D18"
        client = clients.Client(base, "result", query)
        await client.open()
        assert client.timers, "nothing on this page redraws itself"
        await client.go(other.drawn, client.timers[-1])
        assert client.runs[-1] == client.drawn == other.drawn, "a run that announces another page empties it"
        await client.close()

    run_apart(visit())


@pytest.mark.long
def test_links_and_uploads_that_ask_for_too_much_cost_the_server_nothing(started: Started) -> None:
    hostile = importlib.import_module("lab.benchmarks.hostile")
    rows = run_apart(hostile.visit(server_command.url(started.port), started.pid, quick=True))
    assert len(rows) > 10
    for why, _, memory, said in rows:
        assert said and not any(hostile.BROKEN in text for text in said), (why, said)
        assert memory <= hostile.MOST_MB, why
    assert hostile.memory_mb(started.pid, "VmHWM") <= hostile.MOST_MB
    flooded, before = rows[-1], rows[-2]
    assert "no widget names" in flooded[0] and flooded[2] - before[2] < 60.0, "210 MB were sent"
    assert any("no longer on this server" in text for text in flooded[3])


def test_nothing_is_left_of_a_starter_that_was_killed(started: Started) -> None:
    family = [started.pid, *_children(started.pid)]
    assert len(family) >= 2, "the server has no process for jobs"
    started.parent.send_signal(signal.SIGKILL)
    started.parent.wait()
    end = time.monotonic() + WAIT_S
    while any(map(_lives, family)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(map(_lives, family))
    assert not server_command.healthy(started.port)
    assert not [path for path in started.log.parent.iterdir() if path.name.startswith("moesim-")]


def _children(pid: int) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            continue
        if parent == pid:
            found += [int(folder.name), *_children(int(folder.name))]
    return found


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


IMPORTED = """
import sys
from moesim.app import server_process

server_process.prepare()
server_process.application()
before = set(sys.modules)
from streamlit.testing.v1 import AppTest

for name in ("calibration", "scenario", "timeline"):
    page = f"from moesim.app import navigation; navigation.run([('{name}', 'Page', ':material/tune:')])"
    drawn = AppTest.from_string(page, default_timeout=120).run()
    assert not drawn.exception and len(drawn.main) > 1, (name, drawn.exception)
libraries = ("PIL", "moesim", "numpy", "pandas", "plotly", "pyarrow")
print(sorted(m for m in set(sys.modules) - before if m.split(".")[0] in libraries))
"""


@pytest.mark.long
def test_drawing_a_page_imports_nothing_more() -> None:
    environment: dict[str, Any] = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def talked_to(app: server_process.App, index: Path) -> None:
    """Serve `app` one connection to a page that is no longer there."""

    async def receive() -> server_process.Message:
        return {"type": "websocket.connect"}

    async def send(message: server_process.Message) -> None:
        if message["type"] == "websocket.send":
            raise OSError("the page is gone")

    async def visit() -> None:
        await server_process.SecurityHeaders(app, index)({"type": "websocket"}, receive, send)

    run_apart(visit())


def test_a_page_left_in_the_middle_of_an_answer_leaves_no_traceback(tmp_path: Path) -> None:
    websockets = importlib.import_module("starlette.websockets")
    index = tmp_path / "index.html"
    index.write_text("<html></html>")

    async def reads_on(scope: Any, receive: Any, send: Any) -> None:
        """As Streamlit: one task answers, another reads, and closes when reading fails."""
        socket = websockets.WebSocket(scope, receive, send)
        await socket.accept()
        with pytest.raises(websockets.WebSocketDisconnect):
            await socket.send_bytes(b"answer")
        with pytest.raises(RuntimeError):
            await socket.receive_bytes()
        await socket.close()

    async def fails(scope: Any, receive: Any, send: Any) -> None:
        raise RuntimeError("a mistake of ours")

    talked_to(reads_on, index)
    with pytest.raises(RuntimeError, match="a mistake of ours"):
        talked_to(fails, index)
