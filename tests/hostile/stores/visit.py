"""What somebody does with a store that was given to them, in a process of its own that is watched.

Nothing may be written outside of the run and of what was named, nothing run that is not ours, nothing hang,
memory stay bounded, and every refusal be one of ours, in words that do no harm to a terminal.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import random
import re
import shutil
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hostile.stores.jobs import JOBS

SECONDS = 40.0  # for all commands of one visit
_SHADOW_BYTES = 1 << 30  # with torch in it
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_FORBIDDEN = {"os.system", "os.exec", "os.posix_spawn", "pickle.find_class", "os.chown"}
_CHANGES = {
    "os.rename",
    "os.remove",
    "os.rmdir",
    "os.mkdir",
    "os.link",
    "os.symlink",
    "os.truncate",
    "os.chmod",
}
_DRAWN = 2000  # numbers: more than a Mersenne twister has words
_LATE_MODULES = {"obstore"}  # of ours, which only some visits need
_UNMADE = (b"\x5a" * 8, b"\xa5" * 8)  # what fresh memory holds under MALLOC_PERTURB_


class Imports:
    """Which modules are looked for that nobody had imported before: a store names none. In front of all other
    finders, so that it sees what `import` and `importlib` ask for, found or not."""

    def __init__(self) -> None:
        self.on = False
        self.seen: list[str] = []
        self._known = {name.partition(".")[0] for name in sys.modules} | _LATE_MODULES
        sys.meta_path.insert(0, self)  # type: ignore[arg-type]

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if self.on and name.partition(".")[0] not in self._known:
            self.seen.append(f"import {name}")

    def end(self) -> None:
        sys.meta_path.remove(self)  # type: ignore[arg-type]


class Watch:
    """Of everything that Python does. A path below a descriptor is one name, or it leads away."""

    def __init__(self, allowed: list[Path]) -> None:
        self._allowed = tuple(f"{path}/" for path in allowed)
        self.seen: list[str] = []
        self.on = False
        self._imports = Imports()
        sys.addaudithook(self._look)

    def turn(self, on: bool) -> None:
        self.on = self._imports.on = on

    def take(self) -> list[str]:
        """What was seen since the last time."""
        found = [*self.seen, *self._imports.seen]
        self.seen.clear()
        self._imports.seen.clear()
        return found

    def _look(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.on:
            return
        if event in _FORBIDDEN:
            self.seen.append(f"{event} {args[0]!r}"[:200])
        elif event == "open" and isinstance(args[2], int) and args[2] & _WRITES:
            self._check(event, args[0])
        elif event in _CHANGES:
            self._check(event, args[0])
            if event in ("os.rename", "os.link"):
                self._check(event, args[1])
        elif event == "subprocess.Popen" and "everystep.shadow" not in args[1]:
            self.seen.append(f"{event} {args[1]!r}"[:200])

    def _check(self, event: str, path: Any) -> None:
        if isinstance(path, int):
            return
        name = os.fsdecode(path)
        inside = f"{name}/".startswith(self._allowed) if "/" in name else name not in ("..", ".")
        if "/.." in name or not inside:
            self.seen.append(f"{event} {name!r}")


def visit(case: dict[str, Any]) -> dict[str, Any]:
    """Do everything to one store; what was found."""
    home = Path(case["home"])
    names = ("run", "rt", "out", "tmp", "local", "bucket")
    watch = Watch([home / name for name in names] + [Path("/proc/self"), Path("/dev/null")])
    faulthandler.enable()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    faulthandler.dump_traceback_later(SECONDS - 2, file=sys.stderr)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    warnings.simplefilter("ignore")
    found: list[list[str]] = []
    for name, work in _work(case, home).items():
        case["progress"](name)
        watch.turn(True)
        try:
            problem = work()
        except SystemExit:
            problem = ""
        except BaseException as error:
            problem = _foreign(error)
        finally:
            watch.turn(False)
        if problem:
            found.append([name, problem])
        found += [[name, f"touched: {seen}"] for seen in watch.take()]
    return {"found": found}


def warm(run: Path, home: Path) -> None:
    """Do it once to a valid store, so that visitors, who are forked, need not import anything. Without
    threads: what is forked has none of them."""
    import torch

    torch.set_num_threads(1)
    order = {"url": "", "job": run.name, "step": 11, "attach": False}
    shutil.copytree(run, home / "run")
    os.environ["EVERYSTEP_RUNTIME_DIR"] = str(home / "rt")
    (home / "out").mkdir()
    for name, work in _work(order, home).items():
        problem = work()
        assert not problem, f"{name} of a valid store: {problem}"
    shutil.rmtree(home / "run")


def _work(case: dict[str, Any], home: Path) -> dict[str, Callable[[], str]]:
    """Readers first, then what changes the store."""
    place = case["url"] or str(home / "run")
    out = home / "out"
    step = str(case["step"])
    reading = [
        ["ls"],
        ["inspect"],
        ["inspect", "@", step],
        ["verify"],
        ["bisect"],
        ["status"],
        ["tune"],
    ]
    reading += [["diff", "@", "3", step], ["prune", "@", "--dry-run"]]
    reading += [["export", "@", step, "--to", "torch", "--file", str(out / "t.pt")]]
    reading += [["export", "@", step, "--to", "safetensors", "--file", str(out / "s.safetensors")]]
    changing = [
        ["tag", "@", step, "mine"],
        ["prune", "@", "--force", "--keep-last", "1"],
        ["rewind", "@", "3", "--yes"],
        ["stop"],
    ]
    work: dict[str, Callable[[], str]] = {}
    for words in reading:
        work[" ".join(words)] = _command(words, place)
    work["tensors"] = lambda: _tensors(place)
    work["restore"] = lambda: _restore(case["job"], place)
    if case["attach"]:
        work["attach"] = lambda: _attach(case["job"], place, home)
    if case["url"]:
        changing += [["rewind", "@", "--take", which, "--yes"] for which in ("bucket", "directory")]
        work["ship"] = lambda: _ship(home / "run", case["url"])
        work["bring and ship"] = lambda: _ship(home / "out" / "run", case["url"])
    for words in changing:
        work[" ".join(words)] = _command(words, place)
    return work


def _command(words: list[str], place: str) -> Callable[[], str]:
    given = (
        [words[0], place, *words[1:]]
        if "@" not in words
        else [place if w == "@" else w for w in words]
    )

    def work() -> str:
        from typer.testing import CliRunner

        from everystep.cli.app import app

        result = CliRunner().invoke(app, given, catch_exceptions=True)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            return _foreign(result.exception)
        if result.exit_code not in (0, 1, 2):
            return f"exit code {result.exit_code}"
        shown = _CONTROL.search(result.output.replace("\x1b[?25h", ""))
        return f"printed {shown[0]!r}: {result.output[:300]!r}" if shown else ""

    return work


def _foreign(error: BaseException) -> str:
    from everystep.errors import EverystepError

    if isinstance(error, EverystepError):
        text = f"{error}"
        shown = _CONTROL.search(text)
        return f"said {shown[0]!r}: {text[:300]!r}" if shown else ""
    place = traceback.extract_tb(error.__traceback__)
    ours = [f for f in place if "/everystep/" in f.filename] or place
    last = f"{ours[-1].filename.rpartition('/everystep/')[2]}:{ours[-1].name}" if ours else "?"
    return f"raised {type(error).__name__} in {last}: {str(error)[:200]}"


def _tensors(place: str) -> str:
    import everystep

    for name, value in everystep.open_run(place).tensors().items():
        if _unmade(value.tobytes()):
            return f"tensors: {name} holds memory that nobody has written"
    return ""


def _restore(job: str, place: str) -> str:
    import everystep

    made = JOBS[job]()
    before = [p.detach().clone() for p in made.model.parameters()]
    try:
        everystep.restore(place, made.model, made.optimizer)
    finally:
        for parameter in made.model.parameters():
            if _unmade(parameter.detach().numpy().tobytes()):
                return "restore: a weight holds memory that nobody has written"  # noqa: B012
    del before
    return ""


def _attach(job: str, place: str, home: Path) -> str:
    import everystep

    made, grown = JOBS[job](), 0
    with everystep.attach(
        made.model, made.optimizer, run=place, state=made.state, **made.options, on_failure="raise"
    ) as run:
        for step in run.steps(run.step + 3):
            _draw()
            made.turn(step)
        cards = [json.loads(card.read_bytes()) for card in (home / "rt").rglob("shadow.json")]
        grown = max((memory("VmHWM", card["pid"]) for card in cards), default=0)
    return f"memory: {grown >> 20} MiB in the shadow" if grown > _SHADOW_BYTES else ""


def _draw() -> None:
    """All words that a generator holds, and numbers of every kind that it keeps one of."""
    import numpy as np
    import torch

    for _ in range(_DRAWN):
        random.random()
        random.gauss(0.0, 1.0)
    np.random.rand(_DRAWN), np.random.randn(3), np.random.randint(0, 99, 3, dtype=np.uint32)
    torch.rand(_DRAWN), torch.randn(3), torch.randn(3, dtype=torch.float64)


def _ship(run: Path, url: str) -> str:
    """As the threads of a shadow do it, behind an attach."""
    from everystep.core.retention import Rules
    from everystep.errors import EverystepError
    from everystep.store.bucket.client import Bucket
    from everystep.store.bucket.ship import BaseShipper
    from everystep.store.bucket.ship_log import LogShipper
    from everystep.store.bucket.tiers import sync_from_bucket
    from everystep.store.disk.meter import Throttle
    from everystep.store.runs import read_lineage
    from everystep.store.term import TermWriter

    with contextlib.suppress(EverystepError):
        sync_from_bucket(run, url)
    candidates = read_lineage(run).candidates
    point = candidates[0].point if candidates else None
    term = TermWriter(run, point, Rules(3)).manifest.term
    with contextlib.suppress(EverystepError):
        BaseShipper(Bucket(url), run, term, Throttle(0)).turn()
    LogShipper(Bucket(url), run, term, Throttle(0)).turn(None)
    return ""


def _unmade(data: bytes) -> bool:
    return any(pattern in data for pattern in _UNMADE)


def memory(name: str, pid: int) -> int:
    with contextlib.suppress(OSError):  # a process that has left
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) << 10
    return 0


def main(case: dict[str, Any], report: int) -> None:
    """In a forked process: never returns."""
    sys.setrecursionlimit(1000)
    home = Path(case["home"])
    os.environ.update(
        EVERYSTEP_RUNTIME_DIR=str(home / "rt"),
        EVERYSTEP_LOCAL_DIR=str(home / "local"),
        EVERYSTEP_QUIET="1",
        TMPDIR=str(home / "tmp"),
        COLUMNS="200",
    )
    errors = os.open(home / "errors", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(errors, 1)
    os.dup2(errors, 2)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    import tempfile

    tempfile.tempdir = None
    case["progress"] = lambda name: os.write(report, f"{json.dumps({'at': name})}\n".encode())
    code = 1
    try:
        os.write(report, f"{json.dumps(visit(case))}\n".encode())
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)
