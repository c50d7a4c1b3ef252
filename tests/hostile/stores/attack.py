"""`python -m tests.hostile.stores`: hostile stores from a seed, visited one after the other."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from everystep.format.planes import pack_planes
from hostile.stores import visit
from hostile.stores.compound import RANDOM_STATES
from hostile.stores.documents import Document, Store, opened
from hostile.stores.mutate import change

_ATTACH_EVERY = 10
_BUCKET_SHARE = 0.25
_TEMPLATES = ("plain", "own", "sparse")
_LAST_STEP = 11
_GROWTH_BLOCKS = 128 << 11  # 512 bytes each
_MEMORY_BYTES = 400 << 20  # of a visitor, who is small before
_GRACE_SECONDS = 20.0
_DEPTH_MAX = 20_000


class Outcome(NamedTuple):
    seed: int
    job: str
    changes: list[str]
    problems: list[str]  # empty: nobody was harmed


class Templates:
    """Valid stores, made by real trainings in a process of their own."""

    def __init__(self) -> None:
        self._home = tempfile.TemporaryDirectory(prefix="hs-")
        self.home = Path(self._home.name)
        (self.home / "rt").mkdir(mode=0o700)
        made = subprocess.run(
            [sys.executable, "-m", "hostile.stores.templates", str(self.home)],
            cwd=Path(__file__).resolve().parents[2],
            env={
                **os.environ,
                "EVERYSTEP_RUNTIME_DIR": str(self.home / "rt"),
                "OMP_NUM_THREADS": "1",
            },
            capture_output=True,
            text=True,
            timeout=300,
        )
        if made.returncode:
            raise RuntimeError(f"no templates: {made.stderr[-2000:]}")
        _pack_log(self.home / "plain")
        visit.warm(self.home / "own", self.home)

    def close(self) -> None:
        self._home.cleanup()


def _pack_log(run: Path) -> None:
    """A log of byte planes, as models have it that are larger than these."""
    store = Store(run)
    for document in store.of("log")[-1:]:
        for _, _, entries in document.tree["records"]:
            for entry in entries:
                planes, chunks = pack_planes(memoryview(entry[1]), 4, 1)
                entry[0].insert(0, opened(msgspec.to_builtins(planes)))
                entry[1] = b"".join(chunks)
        store.seal(document)


def attack(templates: Templates, seeds: range, jobs: int) -> Iterator[Outcome]:
    """As they come, a few at a time, each in a forked process. This one must never run a kernel of torch."""
    left, running = iter(seeds), {}
    sys.setrecursionlimit(_DEPTH_MAX)  # deep documents have to be written
    while True:
        while len(running) < jobs and (seed := next(left, None)) is not None:
            case = _Case(templates, seed)
            running[case.pid] = case
        if not running:
            return
        pid, status = _wait_for_one(running)
        yield running.pop(pid).judge(status)


def _wait_for_one(running: dict[int, _Case]) -> tuple[int, int]:
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in running:
            return pid, status
        for case in running.values():
            case.look()
        time.sleep(0.01)


class _Case:
    """One hostile store and its visitor."""

    def __init__(self, templates: Templates, seed: int) -> None:
        self.seed = seed
        chance = random.Random(f"hostile {seed}")
        self._home = Path(tempfile.mkdtemp(prefix="hs-"))
        self._outside = self._home / "outside"
        (self._outside / "folder").mkdir(parents=True)
        for name in ("bait", "folder/bait", "folder/manifest.json"):
            (self._outside / name).write_text("nobody may touch this")
        for name in ("rt", "out", "tmp", "local"):
            (self._home / name).mkdir(mode=0o700)
        in_bucket = chance.random() < _BUCKET_SHARE
        self.job = "plain" if in_bucket else chance.choice(_TEMPLATES)
        root = self._home / ("bucket" if in_bucket else "run")
        shutil.copytree(templates.home / ("bucket" if in_bucket else self.job), root)
        if in_bucket:  # and somebody who ships to it
            shutil.copytree(templates.home / "shipped", self._home / "run")
        self.changes = change(Store(root), chance, self._outside)
        self._before = _listing(self._home), _blocks(self._home)
        order = {
            "home": str(self._home),
            "job": self.job,
            "url": f"file://{root}" if in_bucket else "",
            "step": _LAST_STEP,
            "attach": seed % _ATTACH_EVERY == 0 or any(map(_draws, self.changes)),
        }
        self._began = time.monotonic()
        self._least = self._most = 0  # bytes of memory
        self._report, write_end = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            visit.main(order, write_end)
        os.close(write_end)

    def look(self) -> None:
        """At its memory, files that are mapped aside: the kernel takes those back. And end it where even an
        alarm does not."""
        now = visit.memory("RssAnon", self.pid)
        self._least, self._most = min(self._least or now, now or self._least), max(self._most, now)
        if time.monotonic() > self._began + visit.SECONDS + _GRACE_SECONDS:
            os.kill(self.pid, signal.SIGKILL)

    def judge(self, status: int) -> Outcome:
        lines = _read_all(self._report).splitlines()
        told = [json.loads(line) for line in lines]
        at = [line["at"] for line in told if "at" in line]
        problems = [f"{name}: {what}" for line in told for name, what in line.get("found", ())]
        if status:
            code, said = os.waitstatus_to_exitcode(status), (self._home / "errors").read_text()
            how = "hangs" if code in (-signal.SIGALRM, -signal.SIGKILL) else f"ended with {code}"
            problems.append(f"{at[-1] if at else 'begin'}: {how}\n{said[-1500:]}")
        _end_shadows(self._home)
        problems += _changed(self._before[0], _listing(self._home))
        if (grown := self._most - self._least) > _MEMORY_BYTES:
            problems.append(f"memory: {grown >> 20} MiB more")
        if (grown := _blocks(self._home) - self._before[1]) > _GROWTH_BLOCKS:
            problems.append(f"disk: {grown >> 11} MiB more")
        shutil.rmtree(self._home, ignore_errors=True)
        return Outcome(self.seed, self.job, self.changes, problems)


def _draws(change: str) -> bool:
    """Whether a generator may be given what was changed: only who attaches finds out."""
    return change.startswith(RANDOM_STATES) or ".rng" in change


def _read_all(fd: int) -> str:
    with os.fdopen(fd) as file:
        return file.read()


def _listing(home: Path) -> dict[str, tuple[object, ...]]:
    """What lies beside the run, byte for byte. Links are not followed."""
    found: dict[str, tuple[object, ...]] = {}
    for path in (home, *sorted((home / "outside").rglob("*"))):
        at = path.lstat()
        if path == home:
            found["."] = tuple(sorted(p.name for p in home.iterdir() if p.name != "errors"))
        elif path.is_symlink():
            found[str(path.relative_to(home))] = ("link", str(path.readlink()))
        elif path.is_file():
            small = at.st_size < 1 << 26  # a huge one is empty
            digest = hashlib.sha256(path.read_bytes()).hexdigest() if small else at.st_blocks
            found[str(path.relative_to(home))] = (digest, at.st_mode, at.st_mtime_ns)
        else:
            found[str(path.relative_to(home))] = ("other", at.st_mode)
    return found


def _changed(
    before: dict[str, tuple[object, ...]], after: dict[str, tuple[object, ...]]
) -> list[str]:
    names = sorted(before.keys() | after.keys())
    return [f"outside changed: {n}" for n in names if before.get(n) != after.get(n)]


def _blocks(home: Path) -> int:
    return sum(path.lstat().st_blocks for path in home.rglob("*"))


def _end_shadows(home: Path) -> None:
    """Those whose meeting place lies here, found by their environment."""
    mine = f"EVERYSTEP_RUNTIME_DIR={home / 'rt'}".encode()
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mine in (entry / "environ").read_bytes().split(b"\0"):
                os.kill(int(entry.name), signal.SIGKILL)
        except OSError:
            continue


__all__ = ["Document", "Outcome", "Templates", "attack"]
