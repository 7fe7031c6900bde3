"""`moesim app` says in one sentence why it cannot start, and stops what it started."""

from __future__ import annotations

import importlib.util
import signal
import socket
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest

from moesim.app import server_command
from moesim.hwmodels.errors import InputError

Run = Callable[..., Any]


def test_a_port_that_is_taken_is_named(run: Run) -> None:
    pytest.importorskip("streamlit", reason="the dashboard extra is not installed")
    pytest.importorskip("plotly", reason="the dashboard extra is not installed")
    with socket.socket() as other:
        other.bind((server_command.ADDRESS, 0))
        other.listen()
        port = other.getsockname()[1]
        outcome = run("app", "--port", str(port), "--no-browser")
    assert outcome.code == 2 and outcome.out == ""
    assert f"--port {port}" in outcome.err and "another port" in outcome.err and outcome.err.count("\n") == 1


def test_a_missing_extra_is_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_command, "find_spec", lambda name: None)
    outcome = run("app", "--no-browser")
    assert outcome.code == 2 and "pip install 'moesim[dashboard]'" in outcome.err
    monkeypatch.setattr(
        server_command, "find_spec", lambda n: importlib.util.find_spec("json") if n == "plotly" else None
    )
    with pytest.raises(InputError, match="needs streamlit, which is not installed"):
        server_command.check_extra()


@pytest.mark.parametrize("port", ["-1", "65536", "http", "80.5"])
def test_a_port_that_is_none_is_refused(run: Run, port: str) -> None:
    outcome = run("app", "--port", port)
    assert outcome.code == 2 and "--port" in outcome.err


def test_a_free_port_is_found_and_stays_free() -> None:
    port = server_command.chosen_port(0)
    assert server_command.chosen_port(port) == port and not server_command.healthy(port)


def test_the_server_is_told_to_be_careful() -> None:
    assert server_command.command(8501)[-1] == "8501"
    for name, value in {
        "server.address": "127.0.0.1",
        "browser.gatherUsageStats": False,
        "server.enableCORS": True,
        "server.enableXsrfProtection": True,
        "server.maxUploadSize": server_command.MAX_UPLOAD_MB,
        "client.showErrorDetails": "none",
        "logger.enableRich": False,
    }.items():
        assert server_command.SETTINGS[name] == value


class _Server:
    """A server process that ends, or is interrupted, while the command waits for it."""

    def __init__(self, interrupted: bool) -> None:
        self.interrupted = interrupted

    def wait(self) -> None:
        if self.interrupted:
            raise KeyboardInterrupt

    def poll(self) -> int:
        return 3


@pytest.mark.parametrize("interrupted", [True, False])
def test_how_it_ends(run: Run, monkeypatch: pytest.MonkeyPatch, interrupted: bool) -> None:
    @contextmanager
    def running(port: int) -> Any:
        yield _Server(interrupted)

    monkeypatch.setattr(server_command, "check_extra", lambda: None)
    monkeypatch.setattr(server_command, "running", running)
    monkeypatch.setattr(server_command, "wait_until_healthy", lambda *_: True)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        outcome = run("app", "--port", "0", "--no-browser")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert "http://127.0.0.1:" in outcome.err
    if interrupted:
        assert outcome.code == 0 and outcome.err.endswith("stopped\n")
    else:
        assert outcome.code == 1 and "ended by itself (exit code 3)" in outcome.err
