"""Faults planted into a copy of the sources, one at a time: how many programs does the storm need for each?

A mutant is found when a program fails that does not fail in the same way on the sources as they are. To add
one, add an entry; its old text has to occur exactly once.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]


class Mutant(NamedTuple):
    name: str
    file: str  # below src/everystep
    old: str
    new: str


MUTANTS = [
    Mutant(
        "the inner of two nested calls counts",
        "capture/nesting.py",
        '                outer = index_of.get(id(frame.f_locals["args"][0]), outer)',
        "                outer = None",
    ),
    Mutant(
        "gradients carried over a seal are not recorded",
        "capture/pending.py",
        "            sends = self._carries_over(index, gradients)",
        "            sends = self._carries_over(index, gradients) and False",
    ),
    Mutant(
        "slots are watched by version alone",
        "capture/slot_digests.py",
        "        if now == self._digests:",
        "        if True:",
    ),
    Mutant(
        "a turn without a call makes the log's ratio 0",
        "shadow/logcodec.py",
        "            self.ratio = sum(len(payload) for _, payload in entries) / total\n",
        "            pass\n"
        "        self.ratio = sum(len(payload) for _, payload in entries) / max(total, 1)\n",
    ),
    Mutant(
        "break and steps again repeat the turn",
        "session.py",
        "            if calls:\n                self._seal()",
        "            pass",
    ),
    Mutant(
        "weights edited outside a step are not noticed",
        "capture/watch.py",
        "            if mark != self._marks[atom]:",
        "            if False:",
    ),
    Mutant(
        "slots edited outside a step are not noticed",
        "capture/watch.py",
        "        if before.still_holds(optimizer):",
        "        if True:",
    ),
    Mutant(
        "slots that were thrown away come back",
        "recover/slots.py",
        "                    del state[name]",
        "                    pass",
    ),
    Mutant(
        "slots that are no tensors are not replayed",
        "recover/load.py",
        "    elif isinstance(event, SlotValues):",
        "    elif False:",
    ),
    Mutant(
        "groups added during the run do not come back",
        "recover/load.py",
        "    for parameters in stored[len(optimizer.param_groups) :]:",
        "    for parameters in ():",
    ),
    Mutant(
        "buffers that were replaced are not followed",
        "capture/census.py",
        "            self.tensors[atom] = now\n",
        "            pass\n",
    ),
    Mutant(
        "a new base does not say which atoms changed",
        "capture/calls.py",
        "                self._versions[atom] = target",
        "                pass",
    ),
    Mutant(
        "the seal has no user state after the first",
        "capture/tap.py",
        '            state=state if state != self._last_state else b"",',
        '            state=b"" if self._last_state else state,',
    ),
    Mutant(
        "the seal has no group values after the first",
        "capture/tap.py",
        'g if g != old else b"" for g, old in zip(',
        'b"" if old else g for g, old in zip(',
    ),
    Mutant(
        "the seal has the random states of the step before",
        "capture/tap.py",
        "                self._send_seal(step, capture_rng() if rng is None else rng)",
        "                self._send_seal(step, self._last_rng or capture_rng())",
    ),
    Mutant(
        "random states are not restored",
        "session.py",
        "            restore_rng(self._rng_to_restore)",
        "            pass",
    ),
    Mutant(
        "break does not seal a finished step",
        "session.py",
        "                if recorder.tap is not None and recorder.tap.calls:",
        "                if False:",
    ),
    Mutant(
        "status claims one durable step more than there is",
        "shadow/report.py",
        '        "durable_step": step,',
        '        "durable_step": None if step is None else step + 1,',
    ),
    Mutant(
        "a step that raised counts",
        "capture/calls.py",
        "        self.discard()\n        gradients = list(map(_grad, self._parameters[index]))",
        "        self.done(index)\n        gradients = list(map(_grad, self._parameters[index]))",
    ),
]


def plant(mutant: Mutant, folder: Path) -> Path:
    """A copy of the sources with the mutant in it."""
    target = folder / "src"
    shutil.copytree(ROOT / "src", target, ignore=shutil.ignore_patterns("__pycache__"))
    path = target / "everystep" / mutant.file
    text = path.read_text()
    if text.count(mutant.old) != 1:
        raise LookupError(
            f"mutant {mutant.name!r}: {text.count(mutant.old)} times in {mutant.file}, expected once"
        )
    path.write_text(text.replace(mutant.old, mutant.new))
    return target


def hunt(names: list[str], n: int, seed: int, jobs: int) -> int:
    """Print within how many programs each mutant is found; 1 if one is not."""
    chosen = [m for m in MUTANTS if not names or any(name in m.name for name in names)]
    baseline = _Failing(ROOT / "src", jobs)
    missed = 0
    for mutant in chosen:
        with tempfile.TemporaryDirectory(prefix="st-") as folder:
            began = time.monotonic()
            found = _find(_Failing(plant(mutant, Path(folder)), jobs), baseline, n, seed)
        seconds = time.monotonic() - began
        told = f"{found[0]} programs ({found[1]})" if found else f"NOT within {n}"
        print(f"{mutant.name}: {told}, {seconds:.0f} s", flush=True)
        missed += not found
    return int(missed > 0)


def _find(mutated: _Failing, baseline: _Failing, n: int, seed: int) -> tuple[int, str] | None:
    for first in range(seed, seed + n, _BATCH):
        count = min(_BATCH, seed + n - first)
        found = mutated.kinds(first, count)
        known = baseline.kinds(first, count)
        for program in sorted(found):
            if found[program] != known.get(program):
                return program - seed + 1, found[program]
    return None


_BATCH = 20


class _Failing:
    """Which programs fail on some sources, and how. Remembers: the baseline is asked for every mutant."""

    def __init__(self, sources: Path, jobs: int) -> None:
        self._sources, self._jobs = sources, jobs
        self._known: dict[tuple[int, int], dict[int, str]] = {}

    def kinds(self, seed: int, count: int) -> dict[int, str]:
        if (seed, count) not in self._known:
            self._known[seed, count] = self._run(seed, count)
        return self._known[seed, count]

    def _run(self, seed: int, count: int) -> dict[int, str]:
        words = ["--seed", str(seed), "--n", str(count), "--jobs", str(self._jobs), "--json"]
        done = subprocess.run(
            [sys.executable, "-m", "tests.storm", *words],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(self._sources)},
            capture_output=True,
            text=True,
            timeout=60 * count,
        )
        return {int(k): v for k, v in json.loads(done.stdout.splitlines()[-1]).items()}
