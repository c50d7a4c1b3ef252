"""`everystep demo`: the same training without us, with us, and with us under kill -9."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table
from rich.text import Text

from everystep.bench.demo_trainer import Job, Line
from everystep.bench.place import dismiss
from everystep.errors import EverystepError

_TURNS = 20  # of each training, the first one to warm up
_PATIENCE_SECONDS = 300.0


class Demo:
    """Starts trainers, kills them, reads their logs."""

    def __init__(self, folder: Path, steps: int, say: Callable[[str], None]) -> None:
        self._folder = folder
        self._steps = steps
        self._say = say
        self._processes: list[subprocess.Popen[bytes]] = []

    def close(self) -> None:
        """End trainers that were given up, and the shadows that would wait for them."""
        for process in self._processes:
            process.kill()
            process.wait()
        for meeting in self._folder.glob("runtime/*"):
            dismiss(meeting)

    def train_in_turns(self, methods: dict[str, str]) -> dict[str, list[Line]]:
        """Unbroken trainings, a few steps of each at a time: a machine that changes its pace changes it for
        all of them."""
        turn = max(1, self._steps // _TURNS)
        self._say(f"{self._steps} steps each, {turn} at a time …")
        jobs = {name: self._job(name, method, turn) for name, method in methods.items()}
        processes = {name: self._start(job, stdin=subprocess.PIPE) for name, job in jobs.items()}
        order = list(jobs)
        for number in range(-(-self._steps // turn)):
            for name in order:
                self._give_turn(processes[name], jobs[name], number + 1)
            order.reverse()
        for name, process in processes.items():
            if process.wait(_PATIENCE_SECONDS) != 0:
                raise EverystepError(f"demo: {name!r} ended with code {process.returncode}")
        found = {name: _read(job) for name, job in jobs.items()}
        for name, lines in found.items():
            self._say(
                f"  {name}: {1000 * statistics.median(_paces(lines)):.0f} ms a step, "
                f"loss {_last_loss(lines):.3f}"
            )
        return found

    def _give_turn(self, process: subprocess.Popen[bytes], job: Job, number: int) -> None:
        def waits() -> int:
            return sum(line.kind == "wait" for line in _read(job))

        _until(lambda: waits() >= number, process, f"that it waits for turn {number}")
        assert process.stdin is not None
        process.stdin.write(b".")
        process.stdin.flush()
        _until(lambda: waits() > number, process, f"the end of turn {number}")

    def train_killed(
        self, name: str, kills: int, step_seconds: float, chance: random.Random
    ) -> tuple[list[Line], list[int], list[float]]:
        """Train while killing the trainer; returns its log, steps lost and seconds to come back."""
        self._say(f"{name}: {kills} × kill -9 …")
        job = self._job(name, "everystep")
        lost: list[int] = []
        seconds: list[float] = []
        for number in range(kills + 1):
            before = _read(job)
            started = time.time()
            process = self._start(job)
            self._await_new_line(process, job, len(before))
            begin = _read(job)[len(before)]
            if number:
                lost.append(_finished(before) - begin.step)
                first_step = self._await_step(process, job, len(before), begin.step + 1)
                seconds.append(first_step.time - started)
                self._say(f"  back in {seconds[-1]:.1f} s at step {begin.step}, lost {lost[-1]}")
            if number < kills:
                span = (self._steps - begin.step) // (kills + 1 - number)
                target = begin.step + chance.randint(1, max(1, span))
                self._await_step(process, job, len(before), target)
                time.sleep(chance.uniform(0, step_seconds))  # anywhere in the step after it
                process.send_signal(signal.SIGKILL)
                process.wait()
                self._say(f"  killed after {_finished(_read(job))} finished steps")
            elif process.wait(_PATIENCE_SECONDS) != 0:
                raise EverystepError("demo: the last trainer failed")
        return _read(job), lost, seconds

    def _job(self, name: str, method: str, turn: int = 0) -> Job:
        folder = self._folder / name.replace(" ", "-")
        folder.mkdir()
        return Job(method, str(folder), self._steps, str(folder / "log"), turn)

    def _start(self, job: Job, stdin: int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "everystep.bench.demo_trainer"]
        environment = {**os.environ, "EVERYSTEP_RUNTIME_DIR": str(self._folder / "runtime")}
        process = subprocess.Popen(
            [*command, msgspec.json.encode(job).decode()],
            env=environment,
            stdin=stdin,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C is for us alone
        )
        self._processes.append(process)
        return process

    def _await_new_line(self, process: subprocess.Popen[bytes], job: Job, known: int) -> None:
        _until(lambda: len(_read(job)) > known, process, "its first line")

    def _await_step(
        self, process: subprocess.Popen[bytes], job: Job, known: int, steps: int
    ) -> Line:
        """The line with which a trainer has finished that many steps of the run."""

        def found() -> Line | None:
            return next(
                (x for x in _read(job)[known:] if x.kind == "step" and x.step + 1 >= steps), None
            )

        _until(lambda: found() is not None, process, f"step {steps}")
        line = found()
        assert line is not None
        return line


def run_demo(
    *, steps: int, kills: int, seed: int | None, say: Callable[[str], None]
) -> tuple[dict[str, Any], Table]:
    """Run it all; returns the figures and the table people see."""
    seed = random.SystemRandom().randrange(1 << 32) if seed is None else seed
    say(f"a character GPT on Python's own documentation; seed of the kills {seed}")
    with (
        tempfile.TemporaryDirectory(prefix="everystep-demo-") as folder,
        contextlib.closing(Demo(Path(folder), steps, say)) as demo,
    ):
        found = demo.train_in_turns(
            {
                "without us": "none",
                "with us": "everystep",
                "torch.save": "torch.save",
                "again": "none",
            }
        )
        plain, again, ours = found["without us"], found["again"], found["with us"]
        pace = statistics.median(_paces(plain))
        killed, lost, seconds = demo.train_killed(
            "with us and killed", kills, pace, random.Random(seed)
        )
    for name, lines in (*found.items(), ("killed", killed)):
        if difference := _difference(plain, lines):
            say(f"{name}: {difference}")
    figures = {
        "bit_identical": not any(_difference(plain, lines) for lines in (ours, killed)),
        "kills": len(lost),
        "steps_lost_max": max(lost, default=0),
        "overhead_percent": _more_percent(ours, plain, again),
        "torch_save_overhead_percent": _more_percent(found["torch.save"], plain, again),
        "recover_seconds_median": statistics.median(seconds) if seconds else None,
        "noise_percent": _more_percent(again, plain),
        "step_milliseconds": 1000 * pace,
        "steps": steps,
        "seed": seed,
    }
    return figures, _table(figures)


def _table(figures: dict[str, Any]) -> Table:
    table = Table(title="every step a checkpoint", title_justify="left")
    table.add_column("what")
    table.add_column("measured", justify="right")
    recover = figures["recover_seconds_median"]
    rows = [
        ("overhead of everystep, every step", f"{figures['overhead_percent']:+.1f} %"),
        ("overhead of torch.save, every step", f"{figures['torch_save_overhead_percent']:+.1f} %"),
        ("the same for a second training without us", f"{figures['noise_percent']:+.1f} %"),
        ("kill -9 of the trainer", f"{figures['kills']}"),
        ("steps lost per kill, at most", f"{figures['steps_lost_max']}"),
        ("restart to next finished step, median", f"{recover:.1f} s" if recover else "–"),
        (
            "weights, optimizer state, loss curve",
            "bit-identical" if figures["bit_identical"] else Text("DIFFERENT", style="red"),
        ),
    ]
    for row in rows:
        table.add_row(*row)
    return table


def _read(job: Job) -> list[Line]:
    """The log so far; a line being written does not count."""
    path = Path(job.log)
    data = path.read_bytes() if path.exists() else b""
    return [
        msgspec.json.decode(line, type=Line) for line in data.splitlines(True) if line[-1:] == b"\n"
    ]


def _until(done: Any, process: subprocess.Popen[bytes], what: str) -> None:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not done():
        if process.poll() is not None:
            raise EverystepError(
                f"demo: a trainer ended with code {process.returncode} before {what}"
            )
        if time.monotonic() > deadline:
            raise EverystepError(
                f"demo: a trainer did not show {what} in {_PATIENCE_SECONDS:.0f} s"
            )
        time.sleep(0.01)


def _finished(lines: list[Line]) -> int:
    """Optimizer steps that were finished: one more than the last index logged."""
    return max((line.step + 1 for line in lines if line.kind == "step"), default=0)


def _paces(lines: list[Line]) -> list[float]:
    """Seconds a step in every turn, with all that was done until it waited again."""
    marks = [line for line in lines if line.kind in ("go", "wait")][1:]
    turns = zip(marks[::2], marks[1::2], strict=True)
    found = [(wait.time - go.time) / (wait.step - go.step) for go, wait in turns]
    return found[1:] or found


def _more_percent(lines: list[Line], *others: list[Line]) -> float:
    """Turn by turn: the others lie on both sides of it."""
    usual: list[float] = [statistics.mean(same) for same in zip(*map(_paces, others), strict=True)]
    pairs = zip(_paces(lines), usual, strict=True)
    ratios = [own / other for own, other in pairs]
    return 100 * (statistics.median(ratios) - 1)


def _last_loss(lines: list[Line]) -> float:
    return float.fromhex([line.loss for line in lines if line.kind == "step"][-1])


def _difference(one: list[Line], other: list[Line]) -> str:
    """Where two trainings differ in a bit: the loss of a step, however often done, or the end."""
    expected = {line.step: line.loss for line in one if line.kind == "step"}
    for line in other:
        if line.kind == "step" and line.loss != expected.get(line.step):
            return f"loss of step {line.step} is {line.loss}, expected {expected.get(line.step)}"
    missing = expected.keys() - {line.step for line in other if line.kind == "step"}
    if missing:
        return f"steps {sorted(missing)} were not done"
    if not one[-1].digest or one[-1].digest != other[-1].digest:
        return "final weights or optimizer state differ"
    return ""
