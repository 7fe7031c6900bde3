"""Jobs: values, errors, cancel, budget, sharing, a bounded cache, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from moesim.app import jobs, pages
from moesim.hwmodels.errors import InputError


# Functions that job processes run; they are found by name, so they come from modules both sides can import.
def test_a_job_returns_the_value_of_its_function() -> None:
    assert jobs.submit("test/sorted", sorted, [3, 1, 2]).result(60.0) == [1, 2, 3]


def test_a_finished_value_comes_from_the_cache_in_the_same_process() -> None:
    first = jobs.submit("test/pid", os.getpid).result(60.0)
    again = jobs.submit("test/pid", os.getpid)
    assert first != os.getpid()
    assert again.done
    assert again.result() == first


def test_one_running_job_serves_everybody_who_asks() -> None:
    first = jobs.submit("test/shared", time.sleep, 1.5)
    assert jobs.submit("test/shared", time.sleep, 1.5) is first
    first.cancel()
    assert not first.cancelled  # one still wants it
    assert first.result(60.0) is None


def test_places_go_to_those_who_asked_first() -> None:
    lane, served = jobs.Lane(1, 0), []
    busy = jobs.Job("test/busy", 1.0)
    assert lane.take(busy)
    waiting = [jobs.Job(f"test/{number}", 1.0) for number in range(6)]

    def serve(job: jobs.Job) -> None:
        if lane.take(job):
            served.append(job.key)
            lane.leave()

    threads = []
    for job in waiting:
        threads.append(threading.Thread(target=serve, args=(job,)))
        threads[-1].start()
        time.sleep(0.03)  # the order of asking is known
    waiting[2].cancel()
    time.sleep(0.3)  # longer than one look at the queue
    lane.leave()
    for thread in threads:
        thread.join(60.0)
    assert served == [job.key for job in waiting if job is not waiting[2]]


def test_a_cancelled_job_ends_its_process(tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    job = jobs.submit("test/cancel", os.system, f"echo $PPID > {mark}; sleep 60")
    end = time.monotonic() + 60
    while not (mark.exists() and mark.read_text().strip()) and time.monotonic() < end:
        time.sleep(0.05)
    process = int(mark.read_text())
    job.cancel()
    with pytest.raises(jobs.JobError, match="cancelled"):
        job.result(60.0)
    while _lives(process) and time.monotonic() < end:
        time.sleep(0.05)
    assert not _lives(process)
    assert jobs.cache.get("test/cancel") is None


def _lives(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_a_job_started_ahead_is_stopped_by_the_only_one_who_waited_for_it() -> None:
    ahead = jobs.submit("test/ahead", time.sleep, 60, ahead=True)
    assert not ahead.cancelled
    waited = jobs.submit("test/ahead", time.sleep, 60)
    assert waited is ahead
    waited.cancel()
    with pytest.raises(jobs.JobError, match="cancelled"):
        ahead.result(30.0)


def test_a_job_over_its_budget_is_stopped_and_says_so() -> None:
    job = jobs.submit("test/budget", time.sleep, 60, budget_s=0.3)
    with pytest.raises(jobs.JobError, match="took longer than its 1 s"):
        job.result(60.0)


def test_a_job_that_waits_for_a_processor_keeps_its_budget() -> None:
    job = jobs.submit("test/waits", time.sleep, 0.8, budget_s=0.4)  # twice its processor time on the clock
    assert job.result(60.0) is None


def test_errors_of_the_visitor_keep_their_kind_key_and_nearest_values() -> None:
    from moesim.app import predictions
    from moesim.simulator.scenario import load_scenario

    job = jobs.submit(
        "test/illegal", predictions.check, load_scenario("deepseek-v3-2048xh800", ["parallel.ep=48"])
    )
    with pytest.raises(InputError) as caught:
        job.result(60.0)
    assert caught.value.key == "parallel.ep"
    assert caught.value.nearest == (32, 64)


def test_a_fault_of_ours_is_one_sentence_without_its_text() -> None:
    job = jobs.submit("test/broken", int, "secret")
    with pytest.raises(
        jobs.JobError, match=r"^the computation failed \(ValueError\); the server's log says why$"
    ):
        job.result(60.0)


def test_a_process_that_dies_is_an_error_not_a_wait() -> None:
    with pytest.raises(jobs.JobError, match="ended without a result"):
        jobs.submit("test/dies", os._exit, 3).result(60.0)


def test_the_server_is_started_again_after_it_died() -> None:
    jobs.submit("test/before", abs, -1).result(60.0)
    assert jobs._server is not None
    jobs._server._process.kill()
    jobs._server._process.wait(10)
    assert jobs.submit("test/after", abs, -2).result(60.0) == 2


def test_a_job_answers_before_it_stores(tmp_path: Path) -> None:
    for name in ("fresh", "ahead"):  # the second job finds a process that was forked ahead of it
        kept = tmp_path / name
        writes = partial(Path.write_text, kept, "kept")
        assert jobs.submit(f"test/later/{kept}", jobs.once_sent, writes).result(5.0) is None
        deadline = time.monotonic() + 5.0
        while not (kept.exists() and kept.read_text()) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert kept.read_text() == "kept"
        time.sleep(1.0 if name == "fresh" else 0.0)


def test_the_cache_forgets_what_was_not_used_for_longest() -> None:
    import pickle

    cache = jobs.Cache(limit_bytes=3 * len(pickle.dumps(b"x" * 100)))
    for name in "abc":
        cache.put(name, pickle.dumps(name.encode() * 100))
    assert cache.get("a") == b"a" * 100
    cache.put("d", pickle.dumps(b"d" * 100))
    assert cache.get("b") is None
    assert [cache.get(name) is not None for name in "acd"] == [True, True, True]
    assert cache.used_bytes <= cache.limit_bytes
    cache.put("huge", b"x" * 10_000)
    assert cache.get("huge") is None
    assert cache.used_bytes <= cache.limit_bytes


def test_too_many_waiting_jobs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "MOST_WAITING", 0)
    with pytest.raises(jobs.JobError, match="busy"):
        jobs.submit("test/busy", abs, -3)


def test_the_server_says_where_predictions_cannot_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from moesim.app import job_server
    from moesim.simulator.studies import result_cache

    (tmp_path / "file").write_text("")
    monkeypatch.setenv(result_cache.FOLDER, str(tmp_path / "file"))
    monkeypatch.setattr(result_cache, "_problem", None)
    job_server.prepare()
    assert len([r for r in caplog.records if "predictions are not kept" in r.getMessage()]) == 1
    assert result_cache.problem() is not None  # which children inherit: they do not try again


def test_the_server_predicts_ahead_once_the_engine_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    import moesim
    from moesim.app import job_server
    from moesim.app.pages import HOME
    from moesim.simulator.engine import registry

    done: list[str] = []
    monkeypatch.setattr(moesim, "simulate", lambda name: done.append(name))
    monkeypatch.setattr("gc.freeze", lambda: None)
    monkeypatch.setattr(registry, "start_in_background", lambda: done.append("compile"))
    monkeypatch.setattr(registry, "problem", lambda: None)
    monkeypatch.setattr(registry, "is_ready", lambda: len(done) > 1)
    tries = [3]
    while tries[-1]:
        tries.append(job_server.warm(tries[-1]))
    assert (tries, done) == ([3, 2, 1, 0], ["compile", "compile", HOME])
    done.clear()
    monkeypatch.setenv("MOESIM_ENGINE", "no such engine")
    assert job_server.warm(3) == 0, "an error is logged and ends the attempts"


# -- limits that the system keeps -------------------------------------------------------------------------


def test_a_job_over_its_memory_is_stopped_and_says_so() -> None:
    job = jobs.submit("test/memory", bytearray, 4 * jobs.JOB_BYTES)
    with pytest.raises(jobs.JobError, match=r"more than its 1\.5 GB of memory"):
        job.result(60.0)


def test_a_result_too_large_to_hold_is_refused() -> None:
    with pytest.raises(InputError, match="more than the 16 MB"):
        jobs.submit("test/large", bytearray, 2 * jobs.VALUE_BYTES).result(60.0)


@pytest.mark.long
def test_a_job_ends_by_itself_where_nobody_ends_it() -> None:
    # Loops of the interpreter that nothing outside stops: the limits are the process's own.
    ends = f"import sys; sys.path[:] = {sys.path!r}; from moesim.app import jobs; jobs.enforce(-4.5); "
    for loop in ("exec('while True: pass')", "import time; time.sleep(600)"):
        done = subprocess.run([sys.executable, "-c", ends + loop], timeout=120, check=False)
        assert -done.returncode in (signal.SIGALRM, signal.SIGXCPU, signal.SIGKILL)


def test_work_that_is_too_large_is_refused_before_it_starts() -> None:
    from moesim.app import state

    with pytest.raises(
        InputError, match=r"125,000 micro-batches .* the dashboard.*moesim simulate"
    ) as caught:
        state.build(pages.HOME, ("batch.sequences=16000000",))
    assert caught.value.key == "batch.sequences" and len(caught.value.nearest) == 1


def test_a_link_has_a_length() -> None:
    from moesim.app import state

    for texts in (("seed=1",) * 300, ("description=" + "x" * 20_000,)):
        with pytest.raises(InputError, match="upload the scenario as a file"):
            state.build(pages.HOME, texts)
