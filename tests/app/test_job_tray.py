"""The tray: what a visitor started is found again after a reload, and nobody else sees or stops it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("streamlit", reason="the dashboard extra is not installed")

from app_sessions import run_apart
from streamlit.testing import v1 as testing

from moesim.app import jobs, long_work, server_process, tray, visitors
from moesim.app.tray import JobOrigin, Tray

TITLE = JobOrigin("Plan search", "a scenario", "planner")

PAGE = """
import time
from moesim.app import state, widgets
from moesim.app.views import scenario_header
state.synchronise()
found = widgets.long_work('sleep', 'test/tray', 'Sleep', time.sleep, 30)
scenario_header.show_tray()
state.publish()
"""


@pytest.fixture
def kept() -> Iterator[Tray]:
    """A tray of its own, with nothing left running at the end."""
    made = Tray()
    yield made
    for visitor in list(made._entries):
        for entry in made.of(visitor):
            made.close(visitor, entry.number)


def until(is_true: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.05)


# -- the token --------------------------------------------------------------------------------------


def test_a_token_is_random_signed_and_bound_to_this_server(monkeypatch: pytest.MonkeyPatch) -> None:
    first, other = visitors.issued(), visitors.issued()
    assert first != other
    assert len(bytes.fromhex(first.partition(".")[0])) * 8 == 128
    assert visitors.is_ours(first)
    assert not visitors.is_ours(first[:-1] + ("0" if first[-1] != "0" else "1"))
    monkeypatch.setattr(visitors, "_secret", lambda: b"another server")
    assert not visitors.is_ours(first)


@pytest.mark.parametrize(
    "text", ["", ".", "x", "0" * 32, f"{'0' * 32}.{'0' * 32}", f"{'0' * 65}", "a.b.c", "\x00" * 65, "é" * 65]
)
def test_a_malformed_or_forged_token_is_nobody(text: str) -> None:
    assert not visitors.is_ours(text)
    assert visitors.in_header(f"{visitors.COOKIE}_8501={text}") is None


def test_the_token_is_found_among_other_cookies() -> None:
    token = visitors.issued()
    forged = f"{visitors.COOKIE}_1={'0' * 32}.{'0' * 32}"
    header = f"_streamlit_xsrf=2|a|b; {forged}; {visitors.COOKIE}_8501={token}"
    assert visitors.in_header(header) == token
    assert visitors.in_header(f"other{visitors.COOKIE}_8501={token}") is None


async def _answered(cookie: str, kind: bytes) -> dict[bytes, bytes]:
    """The headers of an answer of the middleware."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]})

    told: list[Any] = []

    async def send(message: Any) -> None:
        told.append(message)

    async def receive() -> Any:
        return {}

    made = server_process.SecurityHeaders.__new__(server_process.SecurityHeaders)
    made.app, made.headers = app, []
    scope = {"type": "http", "headers": [(b"cookie", cookie.encode())], "server": ("127.0.0.1", 8501)}
    await made(scope, receive, send)
    return dict(told[0]["headers"])


def test_a_page_gives_a_new_visitor_a_cookie_that_scripts_cannot_read() -> None:
    found = run_apart(_answered("", b"text/html; charset=utf-8"))[b"set-cookie"].decode()
    assert found.startswith(f"{visitors.COOKIE}_8501=")
    assert "HttpOnly" in found and "SameSite=Lax" in found and "Path=/" in found
    token = visitors.in_header(found.partition(";")[0])
    assert token is not None
    known = run_apart(_answered(f"{visitors.COOKIE}_8501={token}", b"text/html"))
    assert b"set-cookie" not in known
    assert b"set-cookie" not in run_apart(_answered("", b"text/javascript"))
    forged = f"{visitors.COOKIE}_8501={'0' * 32}.{'0' * 32}"
    assert b"set-cookie" in run_apart(_answered(forged, b"text/html"))


def test_a_connection_without_a_token_gets_one_at_once() -> None:
    seen: list[str | None] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(visitors.in_header(server_process._cookies(scope)))
        await send({"type": "websocket.accept"})

    told: list[Any] = []

    async def send(message: Any) -> None:
        told.append(message)

    async def receive() -> Any:
        return {"type": "websocket.disconnect"}

    made = server_process.SecurityHeaders.__new__(server_process.SecurityHeaders)
    made.app, made.headers = app, []
    run_apart(made({"type": "websocket", "headers": [], "server": ("127.0.0.1", 1)}, receive, send))
    given = dict(told[0]["headers"])[b"set-cookie"].decode().partition(";")[0]
    assert seen == [visitors.in_header(given)] != [None]


# -- the list ---------------------------------------------------------------------------------------


def test_another_visitor_neither_sees_nor_stops_nor_closes_a_job(kept: Tray) -> None:
    mine = kept.start("me", TITLE, "test/mine", time.sleep, 60)
    assert kept.of("you") == []
    assert kept.find("you", "test/mine") is None
    kept.stop("you", mine.number)
    kept.close("you", mine.number)
    assert kept.of("me") == [mine] and mine.is_open
    kept.stop("me", mine.number)
    assert mine.state == "stopped" and not jobs.known("test/mine")
    assert kept.of("me") == [mine], "it is listed until it is closed"
    kept.close("me", mine.number)
    assert kept.of("me") == []


def test_two_visitors_share_a_job_that_ends_when_both_have_stopped_it(kept: Tray) -> None:
    mine = kept.start("me", TITLE, "test/shared", time.sleep, 60)
    yours = kept.start("you", TITLE, "test/shared", time.sleep, 60)
    assert mine.number != yours.number
    kept.stop("me", mine.number)
    kept.stop("me", mine.number)
    assert mine.state == "stopped" and yours.is_open
    kept.stop("you", yours.number)
    assert not jobs.known("test/shared")


def test_the_same_question_again_is_the_same_entry(kept: Tray) -> None:
    first = kept.start("me", TITLE, "test/again", time.sleep, 60)
    assert kept.start("me", TITLE, "test/again", time.sleep, 60) is first
    kept.stop("me", first.number)
    again = kept.start("me", TITLE, "test/again", time.sleep, 60)
    assert again.is_open and kept.of("me") == [again]


def test_the_end_of_a_job_is_listed_with_its_reason(kept: Tray) -> None:
    kept.start("me", TITLE, "test/fine", str, 7)
    failed = kept.start("me", TITLE, "test/fails", int, "seven")
    until(lambda: not any(entry.is_open for entry in kept.of("me")))
    assert {entry.key: entry.state for entry in kept.of("me")} == {
        "test/fine": "done",
        "test/fails": "failed",
    }
    assert "failed (ValueError)" in str(failed.error)


def test_a_visitor_may_run_a_few_jobs_and_no_more(kept: Tray) -> None:
    for number in range(tray.MOST_RUNNING):
        kept.start("me", TITLE, f"test/many {number}", time.sleep, 60)
    with pytest.raises(jobs.JobError, match="stop one"):
        kept.start("me", TITLE, "test/one more", time.sleep, 60)
    kept.start("you", TITLE, "test/yours", time.sleep, 60)


def test_the_oldest_finished_entries_make_room(kept: Tray, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tray, "MOST_ENTRIES", 3)
    for number in range(5):
        kept.start("me", TITLE, f"test/short {number}", str, number)
        until(lambda: not any(entry.is_open for entry in kept.of("me")))
    assert [entry.key for entry in kept.of("me")] == [f"test/short {n}" for n in (4, 3, 2)]
    monkeypatch.setattr(tray, "MOST_OF_ALL", 3)
    kept.start("you", TITLE, "test/short 9", str, 9)
    assert [entry.key for entry in kept.of("me")] == [f"test/short {n}" for n in (4, 3)]


def test_jobs_stop_when_their_visitor_has_been_gone_for_long() -> None:
    now = [0.0]
    made = Tray(lambda: now[0])
    entry = made.start("me", TITLE, "test/left", time.sleep, 60)
    now[0] = tray.GONE_S - 1
    made.expire()
    assert entry.is_open
    made.of("me")  # the page asks
    now[0] += tray.GONE_S + 1
    made.expire()
    assert entry.state == "stopped" and "15 minutes" in str(entry.error)
    now[0] += tray.KEPT_S
    made.expire()
    assert made._entries == {} and made._seen == {}


def test_results_stay_in_the_cache_until_they_are_closed() -> None:
    cache = jobs.Cache(1000)
    cache.put("kept", b"x" * 400)
    cache.hold("kept")
    for number in range(20):
        cache.put(f"{number}", b"y" * 100)
    assert "kept" in cache and cache.used_bytes <= 1000
    cache.put("more", b"z" * 300)
    cache.hold("more")  # more than half of it is never held: the first one loses its place
    for number in range(20):
        cache.put(f"{number}", b"y" * 100)
    assert "more" in cache and "kept" not in cache
    cache.release("more")
    for number in range(20):
        cache.put(f"{number}", b"y" * 100)
    assert "more" not in cache and cache.used_bytes <= 1000


def test_time_left_follows_from_the_share_and_is_else_unknown(kept: Tray) -> None:
    entry = kept.start("me", TITLE, "test/left time", time.sleep, 60)
    until(lambda: entry.state == "running")
    assert entry.job is not None and entry.left_s is None
    entry.job.started = time.monotonic() - 30.0
    entry.job.progress = jobs.JobProgress(0.25, "")
    assert entry.left_s == pytest.approx(90.0, abs=1.0)


def test_progress_never_goes_back() -> None:
    progress = jobs.JobProgress(0.5, "a")
    assert jobs._further(progress, 0.2, "b") == jobs.JobProgress(0.5, "b")
    assert jobs._further(progress, None, "c") == jobs.JobProgress(0.5, "c")
    assert jobs._further(progress, 7.0, "d").share == 1.0


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.4, "0 s"), (59, "59 s"), (60, "1 min"), (200, "3 min 20 s"), (3900, "1 h 5 min")],
)
def test_durations_in_words(seconds: float, words: str) -> None:
    assert long_work.duration(seconds) == words


# -- the page ---------------------------------------------------------------------------------------


def opened(token: str, monkeypatch: pytest.MonkeyPatch) -> testing.AppTest:
    monkeypatch.setattr(visitors, "_cookies", lambda: [token])
    return testing.AppTest.from_string(PAGE, default_timeout=60).run()


def keys(app: testing.AppTest, start: str) -> list[str]:
    return [str(button.key) for button in app.button if str(button.key).startswith(start)]


@pytest.mark.long
def test_a_reload_finds_the_job_and_another_visitor_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    me, you = visitors.issued(), visitors.issued()
    first = opened(me, monkeypatch)
    assert keys(first, "tray") == []
    first.button(key="start sleep").click().run()
    assert not first.exception
    (stop,) = keys(first, "tray stop")
    reloaded = opened(me, monkeypatch)
    assert keys(reloaded, "tray stop") == [stop]
    assert keys(reloaded, "start") == [], "the page shows the progress instead"
    for token in (you, me[:-1], "forged", ""):
        other = opened(token, monkeypatch)
        assert keys(other, "tray") == [] and keys(other, "start") == ["start sleep"]
    reloaded = opened(me, monkeypatch)
    reloaded.button(key=stop).click().run()
    assert not jobs.known("test/tray")
    (close,) = keys(reloaded, "tray close")
    assert any("Stopped after" in caption.value for caption in reloaded.caption)
    reloaded.button(key=close).click().run()
    assert keys(reloaded, "tray") == [] and not reloaded.exception
