"""Runs a program: the reference, lives until one reaches the end, then one more that only opens the run."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from storm import disasters
from storm.child import read_journal
from storm.draw import PARTS, life_of_faults
from storm.nursery import Nursery
from storm.program import Program
from storm.render import source

_SECONDS = 30.0  # a life that takes longer hangs: it dumps its stack and is ended
_GONE_SECONDS = 10.0
_AWAKE_SECONDS = 0.2


@dataclass
class Life:
    """What one process told, and how it ended: `killed`, `closed`, `raised`, `fresh` or `hung`."""

    number: int
    ended: str
    events: list[dict[str, Any]]
    errors: str = ""
    host_lost: bool = False  # its shadow died with it, or is where the next life cannot see it
    after: tuple[str, ...] = ()  # disasters that followed

    def all(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["kind"] == kind]


@dataclass
class Outcome:
    """Everything the oracle judges by."""

    reference: Life
    lives: list[Life] = field(default_factory=list)
    shadow_log: str = ""


class Runner:
    """Owns the folder of one program."""

    def __init__(
        self, nursery: Nursery, program: Program, *, cold: bool = False, plant: str = ""
    ) -> None:
        self._nursery = nursery
        self._program = program
        self._cold, self._plant = cold, plant
        self._folder = Path(tempfile.mkdtemp(prefix="st-"))
        self._pids = self._folder / "pids"
        self._pids.mkdir()
        self._environment = {
            "EVERYSTEP_RUNTIME_DIR": str(self._folder / "rt"),
            "STORM_PIDS": str(self._pids),
        }
        self._source = self._folder / "program.py"
        self._source.write_text(source(program))
        self._run = str(self._folder / "run")
        self._seed_less = 0

    def run(self) -> Outcome:
        try:
            outcome = Outcome(self._live(-1))
            if outcome.reference.ended == "closed":
                self._break(outcome)
            outcome.shadow_log = self._shadow_log()
            return outcome
        finally:
            self._kill_shadows()
            shutil.rmtree(self._folder, ignore_errors=True)

    def _break(self, outcome: Outcome) -> None:
        """Lives that end by faults, one that reaches the end, one that opens what was closed."""
        ends = [PARTS["faults"][f.name].gives for f in self._program.faults]
        deadly = [gives for gives in ends if "ends" in gives]
        number = finished = 0
        while finished < 2 and number <= len(deadly) + 3:
            life = self._live(number)
            if life.ended == "fresh" and self._begins_anew(outcome.lives):
                self._forget_run(number)
                life = self._live(number)
            outcome.lives.append(life)
            if life.ended in ("hung", "fresh") or (
                life.ended == "raised" and life.all("raised")[-1]["error"]
            ):
                return
            life.host_lost = (
                number < len(deadly) and "host" in deadly[number] and life.ended == "killed"
            )
            if life.host_lost:
                self._kill_shadows()
            finished += bool(life.all("end"))
            if finished == 1:
                self._wake_zombies()
            if number < len(deadly):
                self._strike_between(life)
            number += 1

    def _begins_anew(self, lives: list[Life]) -> bool:
        """Nothing was ever sealed, or only a shadow held it that died: then beginning anew is right, from the
        first seed; the oracle has the last word."""
        return not any(life.all("end") for life in lives)

    def _forget_run(self, number: int) -> None:
        self._kill_shadows()
        shutil.rmtree(self._run, ignore_errors=True)
        self._seed_less = number

    def _live(self, number: int) -> Life:
        journal, errors = self._folder / f"journal{number}", self._folder / f"errors{number}"
        before = len(read_journal(journal))
        order = {
            "source": str(self._source),
            "life": number,
            "run": self._run,
            "journal": str(journal),
            "errors": str(errors),
            "env": self._environment,
            "seconds": _SECONDS,
            "cold": self._cold,
            "steps": self._program.steps,
            "seed_less": self._seed_less if number == self._seed_less else 0,
            "fresh_is_an_end": number != self._seed_less,
            "plant": self._plant if number > 0 else "",
        }
        code = self._nursery.live(order, _SECONDS + 15)
        said = errors.read_text(errors="replace") if errors.exists() else ""
        events = read_journal(journal)
        return Life(number, _how(code, events[before:], said), events, said)

    def _strike_between(self, life: Life) -> None:
        struck = []
        for pick, number in zip(self._program.faults, life_of_faults(self._program), strict=True):
            what = PARTS["faults"][pick.name].text.get("between")
            # a run that was killed before it had a directory has nothing to strike
            if what and number == life.number and Path(self._run).exists():
                strike, which = getattr(disasters, what), pick.values.get("which", 0)
                self._run = strike(self._run, self._environment, which)
                struck.append(pick.name)
                life.host_lost |= what == "elsewhere"
        life.after = tuple(struck)

    def _shadow_log(self) -> str:
        logs = sorted(self._folder.rglob("shadow.log*"))
        return "\n".join(path.read_text(errors="replace") for path in logs)

    def _shadows(self) -> list[int]:
        """Those forked by the nursery, and those that are programs."""
        found = {int(path.name) for path in self._pids.iterdir()}
        mine = f"STORM_PIDS={self._pids}".encode()
        for entry in Path("/proc").iterdir() if self._cold else ():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and mine in (entry / "environ").read_bytes().split(b"\0"):
                    found.add(int(entry.name))
        return [pid for pid in found if Path(f"/proc/{pid}").exists() and pid != os.getpid()]

    def _wake_zombies(self) -> None:
        """Whoever was stopped comes to itself, and does what it was about to do, before the run is opened
        for the last time."""
        stopped = [pid for pid in self._shadows() if _is_stopped(pid)]
        for pid in stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        time.sleep(_AWAKE_SECONDS if stopped else 0)

    def _kill_shadows(self) -> None:
        deadline = time.monotonic() + _GONE_SECONDS
        while left := self._shadows():
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > deadline:
                return
            time.sleep(0.005)
        for path in self._pids.iterdir():
            path.unlink(missing_ok=True)


def _is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def _how(code: int | None, events: list[dict[str, Any]], said: str) -> str:
    if code is None or "Timeout (" in said:
        return "hung"
    if code in (-signal.SIGKILL, -signal.SIGALRM):
        return "killed"
    if events and events[-1]["kind"] == "fresh":
        return "fresh"
    return "closed" if code == 0 else "raised"
