"""Where a restarted trainer finds the shadow before it: under whatever name the run's directory is reached,
also after it was moved; and never in silence where the directory is not the shadow's any more."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner
from waiting import wait_until

import everystep
from everystep.cli.app import app
from everystep.errors import DirectoryLost
from everystep.lane.control import AskStatus, ask
from everystep.lane.host import process_start
from everystep.lane.runtime import ShadowCard, read_card, runtime_dir, write_card
from everystep.recover import find, from_shadow
from everystep.recover.meet import shadow_of
from everystep.standing import Standing
from everystep.store.runs import Known, claim_term, create_run, write_manifest

from .jobs import Job, read_journal
from .nursery import Nursery
from .processes import alive, shadows

STEPS = 12
_trainers: list[int] = []


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    made = Nursery()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def no_trainer_left(nursery: Nursery, runtime: Path) -> Iterator[None]:
    """Before the shadows are killed: a trainer that a failed test has left would start new ones."""
    yield
    while _trainers:
        kill(nursery, _trainers[-1])


def begin(nursery: Nursery, journal: Path, run: Path, steps: int = STEPS, **options: Any) -> int:
    """A trainer that has made so many steps and goes on."""
    given = {"on_lag": "wait", "durable_every": "1h", "pause_seconds": 0.01, **options}
    pid = nursery.start("sgd_momentum", 10**6, journal, run=run, **given)
    _trainers.append(pid)
    wait_until(lambda: newest(journal) >= steps or not alive(pid), f"{steps} steps")
    assert alive(pid), nursery.why()
    return pid


def kill(nursery: Nursery, pid: int) -> None:
    _trainers.remove(pid)
    os.kill(pid, signal.SIGKILL)
    assert nursery.wait(pid) == -signal.SIGKILL


def newest(journal: Path) -> int:
    return max((e["step"] for e in read_journal(journal) if e["kind"] == "step"), default=0)


def status(run: Path) -> dict[str, Any]:
    card = read_card(runtime_dir(str(run)))
    assert card is not None, "no shadow meets others there"
    return ask(card.control, AskStatus(), timeout_seconds=30).status


def wait_for_last_words(run: Path, journal: Path) -> None:
    # a journal has no line for the step during which the trainer was killed
    wait_until(lambda: (status(run)["durable_step"] or 0) >= newest(journal) - 1, "last words")


def resumed(nursery: Nursery, journal: Path, run: Path, **options: Any) -> dict[str, Any]:
    """A short life that ends well; where it began."""
    before = newest(journal)
    nursery.run("sgd_momentum", before + 5, journal, run=run, on_lag="wait", **options)
    began: dict[str, Any] = [e for e in read_journal(journal) if e["kind"] == "resumed"][-1]
    assert before - 1 <= began["step"] <= before + 1, f"{before} steps were done, {began}"
    assert command("verify", run)[1]["problems"] == []
    return began


def command(*words: object) -> tuple[int, dict[str, Any]]:
    result = CliRunner().invoke(app, [*map(str, words), "--json"])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, json.loads(result.stdout)


def test_a_symlink_leads_to_the_same_shadow(nursery: Nursery, tmp_path: Path) -> None:
    run, link, journal = tmp_path / "run", tmp_path / "link", tmp_path / "journal"
    kill(nursery, begin(nursery, journal, run))
    link.symlink_to("run")
    assert resumed(nursery, journal, link)["source"] == "shadow"
    assert link.is_symlink() and everystep.open_run(run).steps[-1] == newest(journal)


def test_a_moved_directory_finds_its_shadow(
    nursery: Nursery, runtime: Path, tmp_path: Path
) -> None:
    """The shadow has not written its newest steps when the directory is moved; it does not make the old one
    anew, says what is wrong, and hands over to who comes to the new one."""
    run, moved, journal = tmp_path / "run", tmp_path / "moved", tmp_path / "journal"
    trainer = begin(nursery, journal, run)
    (pid,) = shadows(runtime)
    wait_until(lambda: status(run)["durable_step"] is not None, "a base")
    os.kill(pid, signal.SIGSTOP)
    run.rename(moved)
    kill(nursery, trainer)
    os.kill(pid, signal.SIGCONT)
    wait_until(lambda: status(run)["health"] == "degraded", "status to say degraded")
    wait_until(lambda: status(run)["trainer_pid"] is None, "the trainer's end to be noticed")
    told = status(run)
    assert "is gone" in told["problem"] and str(run) in told["problem"]
    assert (
        told["durable_step"] is None and "nothing to resume" in command("status", run)[1]["summary"]
    )
    assert command("status", moved)[1]["durable_step"] is not None, "that directory holds a base"
    code, refusal = command("stop", run)
    assert code == 2 and "cannot write its newest step" in refusal["error"]
    job = Job("sgd_momentum")
    with pytest.raises(DirectoryLost, match="is gone"):
        everystep.attach(job.model, job.optimizer, run=run, every=1, state=job.state)
    assert resumed(nursery, journal, moved)["source"] == "shadow"
    assert not run.exists(), "the old directory was made anew"
    wait_until(lambda: not shadows(runtime), "both shadows to go")


@pytest.mark.parametrize(
    ("served", "found"),
    [(("new", "old"), True), (("new", "older", "old"), True), (("new", "other"), False)],
    ids=["handed on", "handed on twice", "of another lineage"],
)
def test_a_shadow_that_has_claimed_nothing_yet_is_found_after_a_move(
    served: tuple[str, ...], found: bool, tmp_path: Path
) -> None:
    """The run was moved when it had taken over and not claimed its term yet: from then on it cannot. The
    newest manifest is still that of the attach whose state it was handed."""
    run, moved = tmp_path / "run", tmp_path / "moved"
    manifest = claim_term(run, None, known=Known(0, ("old",)))
    card = ShadowCard(
        os.getpid(),
        process_start(os.getpid()),
        run=str(run),
        run_id=manifest.run_id,
        attaches=served,
    )
    write_card(runtime_dir(str(run)), card)
    run.rename(moved)
    assert (shadow_of(moved, runtime_dir(str(moved))) == card) is found


@pytest.mark.parametrize("host", [socket.gethostname(), "elsewhere"])
def test_a_run_that_was_written_elsewhere_has_no_shadow_here(host: str, tmp_path: Path) -> None:
    """A shadow here speaks for a run of this id, too; but the newest term is another host's."""
    run, moved = tmp_path / "run", tmp_path / "moved"
    manifest = claim_term(run, None, known=Known(0, ("old",)))
    write_manifest(run, msgspec.structs.replace(manifest, host=host))
    card = ShadowCard(
        os.getpid(),
        process_start(os.getpid()),
        run=str(run),
        run_id=manifest.run_id,
        attaches=("old",),
    )
    write_card(runtime_dir(str(run)), card)
    run.rename(moved)
    found = shadow_of(moved, runtime_dir(str(moved)))
    assert found == (None if host == "elsewhere" else card)


def test_a_shadow_is_told_whose_state_it_is_handed(tmp_path: Path) -> None:
    """It may claim its term behind those of them, after it has answered."""
    before = ShadowCard(1, 1, attaches=("older", "old"))
    own, *handed = Standing(tmp_path / "run").at(3, before).known.attaches
    assert handed == ["older", "old"] and own not in handed
    long = msgspec.structs.replace(before, attaches=tuple(map(str, range(99))))
    assert len(Standing(tmp_path / "run").at(3, long).known.attaches) < 10


def test_a_copy_does_not_take_the_shadow(nursery: Nursery, runtime: Path, tmp_path: Path) -> None:
    """It names the same run and the same writer, but the original is where it was."""
    run, copy, journal = tmp_path / "run", tmp_path / "copy", tmp_path / "journal"
    kill(nursery, begin(nursery, journal, run))
    wait_for_last_words(run, journal)
    shutil.copytree(run, copy)
    held = shadows(runtime)
    job = Job("sgd_momentum")
    with everystep.attach(job.model, job.optimizer, run=copy, every=1, state=job.state) as live:
        assert live.status()["resumed_from"] == "store"
        assert set(held) < set(shadows(runtime)), "the original's shadow was taken away"
    assert resumed(nursery, journal, run)["source"] == "shadow"


@pytest.mark.parametrize("left", ["nothing", "an empty directory", "another run"])
def test_a_deleted_run_does_not_come_back_by_itself(
    left: str, nursery: Nursery, runtime: Path, tmp_path: Path
) -> None:
    run, journal, aside = tmp_path / "run", tmp_path / "journal", tmp_path / "aside"
    kill(nursery, begin(nursery, journal, run))
    wait_for_last_words(run, journal)
    run.rename(aside)
    if left == "an empty directory":
        run.mkdir()
    elif left == "another run":
        create_run(run)
    seen = sorted(run.rglob("*"))
    wait_until(lambda: status(run)["durable_step"] is None, "the claim to be taken back")
    (pid,) = shadows(runtime)
    refused = ["auto", "never"] + ["must"] * (left == "another run")
    for resume in refused:
        job = Job("sgd_momentum")
        before = job.digest()
        with pytest.raises(DirectoryLost, match=f"shadow {pid}") as caught:
            everystep.attach(
                job.model, job.optimizer, run=run, every=1, state=job.state, resume=resume
            )
        hint = caught.value.hint or ""
        assert (
            "stop" in hint and "--discard" in hint and 'resume="must"' in hint and "mount" in hint
        )
        assert job.digest() == before and sorted(run.rglob("*")) == seen
    assert shadows(runtime) == [pid]
    if left == "an empty directory":  # adopt what the shadow holds
        assert resumed(nursery, journal, run, resume="must")["source"] == "shadow"
    elif left == "nothing":  # put it back: as if nothing had been
        aside.rename(run)
        wait_until(lambda: status(run)["durable_step"] is not None, "the directory to be noticed")
        assert resumed(nursery, journal, run)["source"] == "shadow"
    else:  # begin without it
        code, told = command("stop", run, "--discard")
        assert code == 0 and told["shadows"][0]["pid"] == pid and not alive(pid)
        job = Job("sgd_momentum")
        with everystep.attach(job.model, job.optimizer, run=run, every=1, state=job.state) as live:
            assert live.step == 0


def test_stop_after_last_words(nursery: Nursery, runtime: Path, tmp_path: Path) -> None:
    """One run by name; then --all, which leaves alone what a trainer uses."""
    runs = [tmp_path / name for name in ("first", "second", "third")]
    journals = [tmp_path / f"{run.name}.journal" for run in runs]
    trainers = [begin(nursery, j, run) for run, j in zip(runs, journals, strict=True)]
    code, refusal = command("stop", runs[0])
    assert (code, refusal["kind"]) == (2, "RunBusy") and f"pid {trainers[0]}" in refusal["error"]
    kill(nursery, trainers[0])
    kill(nursery, trainers[1])
    for words in ([runs[0]], ["--all"]):
        code, told = command("stop", *words)
        assert code == 0, [t["problem"] for t in told["shadows"]]
        ended = [t for t in told["shadows"] if t["ended"]]
        assert len(ended) == 1 and not alive(ended[0]["pid"])
        run, journal = next(
            (r, j) for r, j in zip(runs, journals, strict=True) if str(r) == ended[0]["run"]
        )
        assert ended[0]["durable_step"] >= newest(journal) - 1
        assert everystep.open_run(run).steps[-1] == ended[0]["durable_step"]
    (kept,) = [t for t in told["shadows"] if not t["ended"]]
    assert kept["trainer_pid"] == trainers[2] and shadows(runtime) == [kept["pid"]]
    assert command("stop", runs[0])[1]["shadows"][0]["pid"] is None, "there is nothing to stop"
    for words in ([tmp_path / "nowhere"], [], ["--all", runs[0]], ["--all", "--discard"]):
        assert command("stop", *words)[0] == 2, words


def test_a_fenced_shadow_goes_with_its_trainer(
    nursery: Nursery, runtime: Path, tmp_path: Path
) -> None:
    """What it holds may not be written any more: nothing keeps it for ten idle times."""
    run, journal = tmp_path / "run", tmp_path / "journal"
    trainer = begin(nursery, journal, run, tuning=everystep.Tuning(idle_exit="1h"))
    wait_until(lambda: status(run)["durable_step"] is not None, "a base")
    claim_term(run, None)
    kill(nursery, trainer)
    wait_until(lambda: not shadows(runtime), "the fenced shadow to go")


def test_waiting_for_a_stopped_shadow_is_told(
    nursery: Nursery,
    runtime: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    run, journal = tmp_path / "run", tmp_path / "journal"
    kill(nursery, begin(nursery, journal, run))
    (pid,) = shadows(runtime)
    os.kill(pid, signal.SIGSTOP)
    monkeypatch.setattr(from_shadow, "_SILENT_SECONDS", 0.1)
    folder, answers = runtime_dir(str(run)), []
    asker = threading.Thread(target=lambda: answers.append(find.find_newest(run, folder)[0]))
    with caplog.at_level(logging.WARNING):
        asker.start()
        wait_until(lambda: f"kill -CONT {pid}" in caplog.text, "a word of what is waited for")
        os.kill(pid, signal.SIGCONT)
        asker.join(60)
    assert f"for shadow {pid} to hand over" in caplog.text
    assert answers and answers[0] is not None and answers[0].source == "shadow"
    answers[0].close()
