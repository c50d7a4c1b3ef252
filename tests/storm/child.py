"""One life of a program, in a process of its own, which writes what it sees into a journal."""

from __future__ import annotations

import faulthandler
import logging
import os
import pickle
import random
import struct
import subprocess
import sys
import time
import traceback
import types
import warnings
from pathlib import Path
from typing import Any

from storm.looking import frozen, look, random_states

_TURNS_MAX = 4  # times the steps: a loop that does not end is cut


class Journal:
    """Appended in one write each, so that a kill leaves whole events."""

    def __init__(self, path: str, life: int) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._life = life

    def add(self, kind: str, step: int = -1, **what: Any) -> None:
        event = {"kind": kind, "life": self._life, "step": step, **what}
        data = pickle.dumps(event)
        os.write(self._fd, struct.pack("<I", len(data)) + data)


def read_journal(path: Path) -> list[dict[str, Any]]:
    """Every whole event."""
    data, at, events = path.read_bytes() if path.exists() else b"", 0, []
    while at + 4 <= len(data):
        (size,) = struct.unpack_from("<I", data, at)
        if at + 4 + size > len(data):
            break
        events.append(pickle.loads(data[at + 4 : at + 4 + size]))
        at += 4 + size
    return events


class _Teller:
    """What a program calls to say what it sees."""

    def __init__(self, journal: Journal, order: dict[str, Any]) -> None:
        self._journal, self._order = journal, order
        self._turns = 0

    def __call__(self, kind: str, step: int, seen: Any = None, more: Any = None) -> None:
        what: dict[str, Any] = {}
        if kind == "attached":
            what = {"seen": look(*seen), "status": more.status()}
            if what["status"].get("resumed_from") == "" and self._order["life"] > 0:
                self._journal.add("fresh", step)
                if self._order.get("fresh_is_an_end", True):
                    os._exit(0)
        elif kind in ("done", "end"):
            what = {"seen": {**look(*seen), "random": random_states()}}
            if more is not None:
                what["seen"]["loss"] = frozen(more)
        elif kind == "status":
            what = {"status": seen}
        elif kind == "turn":
            self._turns += 1
            if self._turns > _TURNS_MAX * self._order["steps"]:
                raise RuntimeError("storm: the loop does not end")
        self._journal.add(kind, step, **what)


class _Handler(logging.Handler):
    def __init__(self, journal: Journal) -> None:
        super().__init__(logging.WARNING)
        self._journal = journal

    def emit(self, record: logging.LogRecord) -> None:
        self._journal.add("warned", text=record.getMessage())


def _listen(journal: Journal) -> None:
    """What the user would read on the console is part of what is judged."""
    logging.getLogger("everystep").addHandler(_Handler(journal))
    logging.getLogger("everystep").setLevel(logging.WARNING)

    def show(message: Any, category: Any, filename: str, *_: Any) -> None:
        if "everystep" in str(message):
            journal.add("warned", text=str(message))

    warnings.simplefilter("always")
    warnings.showwarning = show  # type: ignore[assignment]


def live(order: dict[str, Any]) -> None:
    """Exec a program's source and train; never returns."""
    errors = os.open(order["errors"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(errors, 1)
    os.dup2(errors, 2)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    faulthandler.dump_traceback_later(order["seconds"], exit=True, file=sys.stderr)
    os.environ.update(order["env"], STORM_NURSERY=order["nursery"])
    journal = Journal(order["journal"], order["life"])
    _listen(journal)
    if not order["cold"]:
        _start_shadows_warm()
    if order.get("plant"):
        exec(order["plant"], {"order": order})
    code = 1
    try:
        _train(order, _Teller(journal, order))
        code = 0
    except BaseException as error:
        planned = isinstance(error, ZeroDivisionError) and str(error) == "planned"
        planned |= isinstance(error, KeyboardInterrupt)  # nobody else sends one
        journal.add("raised", error=None if planned else describe(error))
        if not planned:
            traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _train(order: dict[str, Any], tell: _Teller) -> None:
    from storm.plain import Plain
    from storm.render import IMPORTS

    program = types.ModuleType("__main__")
    sys.modules["__main__"] = program  # the user's classes are those of a script
    program.__dict__["Plain"] = Plain
    path = order["source"]
    exec(compile(IMPORTS, "imports", "exec"), program.__dict__)
    exec(compile(Path(path).read_text(), path, "exec"), program.__dict__)
    program.__dict__["SEED"] -= order["seed_less"]
    random.seed(0)
    program.__dict__["train"](order["run"], order["life"], tell)


def _start_shadows_warm() -> None:
    import everystep.process.spawn as spawn
    from storm.nursery import WarmPopen

    spawn.subprocess = types.SimpleNamespace(Popen=WarmPopen, PIPE=subprocess.PIPE)  # type: ignore[assignment]


def describe(error: BaseException) -> dict[str, Any]:
    """What an error says, and the place in everystep that it comes from."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if "/everystep/" in f.filename]
    place = ours[-1] if ours else frames[-1]
    name = place.filename.rpartition("/everystep/")[2] if ours else Path(place.filename).name
    from everystep.errors import EverystepError

    return {
        "type": type(error).__name__,
        "text": str(error)[:500],
        "place": f"{name}:{place.name}",
        "ours": bool(ours),
        "known": isinstance(error, EverystepError),
        "hint": getattr(error, "hint", None),
        "time": time.time(),
    }
