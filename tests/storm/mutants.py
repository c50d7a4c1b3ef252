"""Faults planted into a copy of the sources, one at a time: how many programs does the storm need for each?

A mutant is found when a program fails that does not fail in the same way on the sources as they are. To add
one, add an entry; its old text has to occur as often as it says.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]


class Change(NamedTuple):
    file: str  # below src/everystep
    old: str
    new: str
    times: int = 1  # that the old text occurs, each of which is replaced


class Mutant:
    """A fault: one change, or several where each alone is made good by the others."""

    def __init__(
        self,
        name: str,
        file: str,
        old: str,
        new: str,
        times: int = 1,
        also: tuple[Change, ...] = (),
        hidden: Callable[[], str] = lambda: "",
    ) -> None:
        """`hidden`: why no program can show it on this machine, if that is so."""
        self.name, self.hidden = name, hidden
        self.changes = [Change(file, old, new, times), *also]


def _rounds_by_layout() -> bool:
    """Whether this processor's fused kernels give other bits where a weight lies the other way round."""
    import torch

    torch.manual_seed(0)
    weight, gradient = torch.randn(21, 2, 2, 1), torch.randn(21, 2, 2, 1)
    ends = []
    for layout in (torch.channels_last, torch.contiguous_format):
        parameter = torch.nn.Parameter(weight.clone(memory_format=layout))
        optimizer = torch.optim.AdamW([parameter], fused=True)
        for _ in range(20):
            parameter.grad = gradient.clone(memory_format=layout)
            optimizer.step()
        ends.append(parameter.detach().contiguous())
    return not torch.equal(*ends)


_CARRY_OUT = (
    """        try:
            lineage = self._own_lineage()
            doomed = unreferenced(self._run, lineage.candidates, before.term)
            if plan.keep:
                doomed += old_segments(self._run, lineage, plan.log_begins_at)
                newest = self._ended_log()  # no segment behind it tells that it may go
                doomed += [newest[0]] if newest and newest[1] <= plan.log_begins_at else []
            check_fence(self._run, before.term)
        except Fenced:
            if self.manifest != before:
                self._write(before)
            raise
        return remove(doomed, self._check_ours)
""",
    """        return remove(unreferenced(self._run, plan.keep, 10**9), lambda: None)
""",
)
_MOVED_WITH = "    return card if card is not None else _moved_with(run)"

MUTANTS = [
    Mutant(
        "the inner of two nested calls counts",
        "capture/hooks.py",
        '                outer = index_of.get(id(frame.f_locals["args"][0]), outer)',
        "                outer = None",
    ),
    Mutant(
        "gradients carried over a seal are not recorded",
        "capture/pending.py",
        "            sends = self._carries_over(index, gradients, called=called, again=again)",
        "            sends = False",
    ),
    Mutant(
        "slots are watched by version alone",
        "capture/watching/slot_digests.py",
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
        "turns.py",
        "            if calls:\n                self._seal()",
        "            pass",
    ),
    Mutant(
        "weights edited outside a step are not noticed",
        "capture/watching/watch.py",
        "            if mark != self._marks[atom]:",
        "            if False:",
    ),
    Mutant(
        "slots edited outside a step are not noticed",
        "capture/watching/watch.py",
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
        "recover/live.py",
        "        self._slots.values(event)",
        "        pass",
    ),
    Mutant(
        "groups added during the run do not come back",
        "recover/groups.py",
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
        "shadow/replica_state.py",
        "            self.replica.versions[atom] = seal.step",
        "            pass",
    ),
    Mutant(
        "the seal has no user state after the first",
        "capture/seals.py",
        '            state=state if state != said.state else b"",',
        '            state=b"" if said.state else state,',
    ),
    Mutant(
        "the seal has no group values after the first",
        "capture/seals.py",
        'g if g != old else b"" for g, old in zip(',
        'b"" if old else g for g, old in zip(',
    ),
    Mutant(
        "the seal has the random states of the step before",
        "capture/seals.py",
        "        rng, state, groups = values\n",
        "        rng, state, groups = values\n        rng = said.rng or rng\n",
    ),
    Mutant(
        "random states are not restored",
        "resuming.py",
        "            restore_rng(self._rng)",
        "            pass",
    ),
    Mutant(
        "break does not seal a finished step",
        "turns.py",
        "        elif self._recorder.subject.turn.calls:",
        "        elif False:",
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
        "            self._outbox.give_back_room(self._pending[0].at)\n",
        "            self._outbox.add(self._pending[0])\n",
    ),
    Mutant(
        "a gradient of zeros comes back as none",
        "recover/pending.py",
        "torch.zeros_like(parameter, dtype=kind).detach() if zeros[atom] else None",
        "None",
    ),
    Mutant(
        "a sparse gradient comes back dense",
        "recover/pending.py",
        "torch.zeros_like(parameter, layout=torch.sparse_coo).detach()",
        "torch.zeros_like(parameter).detach()",
    ),
    Mutant(
        "optimizers that share a parameter are kept in different modes",
        "capture/census.py",
        "    specs = agree_on_modes(own)",
        "    specs = own",
    ),
    Mutant(
        "calls are not counted once a shadow was lost",
        "recorder.py",
        "            self.tap.remove()\n            self.tap = None\n",
        "            self.tap.remove()\n            self.tap = None\n            self.subject.turn.end()\n",
    ),
    Mutant(
        "a step recorded after its seal has the random states of that time",
        "sealed.py",
        "recorder.tap.seal(recorder.step, self._still_sealed(operation), is_awaited=True)",
        "recorder.tap.seal(recorder.step, recorder.subject.sealed_values())",
    ),
    Mutant(
        "state under keys that are no parameters does not come back",
        "replay/extras.py",
        "    if not logged and len(entries) == len(live):",
        "    if True:",
    ),
    Mutant(
        "a shadow is found by the path as it was given",
        "lane/runtime.py",
        "os.path.realpath(run)",
        "os.path.abspath(run)",
        also=(
            Change("recover/meet.py", _MOVED_WITH, "    return card"),
            Change("store/bucket/tiers.py", "os.path.realpath(run)", "os.path.abspath(run)"),
        ),
    ),
    Mutant(
        "the shadow of a moved run is not found",
        "recover/meet.py",
        _MOVED_WITH,
        "    return card",
    ),
    Mutant(
        "a new Parameter in the place of an old one is not noticed",
        "capture/census.py",
        "from operator import attrgetter, is_, itemgetter\n",
        "from operator import attrgetter, itemgetter\nis_ = lambda now, before: True\n",
    ),
    Mutant(
        "structured arrays lose their fields",
        "format/arrays.py",
        "    fields = [dtype.fields[name] for name in dtype.names]\n",
        "    return dtype.str\n    fields = []\n",
    ),
    Mutant(
        "a turn that an exception left is not taken back",
        "turns.py",
        "        elif self.turn is not Turn.SEALED or calls:\n            self._take_back()\n",
        "",
    ),
    Mutant(
        "a turn counts that the iterator of an inner loop left",
        "loop.py",
        "    return now.instruction in _BREAKS ",
        '    return now.instruction in {*_BREAKS, "FOR_ITER"} ',
    ),
    Mutant(
        "ages go by the wall clock",
        "shadow/base_writer.py",
        "time.monotonic()",
        "time.time()",
        8,
    ),
    Mutant(
        "a deleted run comes back",
        "recover/meet.py",
        "        if lost:\n            here",
        "        if False:\n            here",
    ),
    Mutant(
        "another optimizer class is accepted",
        "recover/matching.py",
        "    if others:\n        raise ModelMismatch(",
        "    if False:\n        raise ModelMismatch(",
    ),
    Mutant(
        "slots that lie the other way round are not watched",
        "capture/watching/slot_digests.py",
        "        and not value.is_conj()\n",
        "        and value.is_contiguous()\n        and not value.is_conj()\n",
    ),
    Mutant(
        "weights that lie the other way round are replayed by torch's fused kernel",
        "capture/census.py",
        "            if not choice.twins and any(",
        "            if False and any(",
        hidden=lambda: "" if _rounds_by_layout() else "torch rounds alike in every layout here",
    ),
    Mutant(
        "a step that draws random numbers is replayed",
        "capture/hooks.py",
        "        return spec.foreign and capture_rng() != self._rng_before",
        "        return False",
    ),
    Mutant(
        "a user's step that takes a closure is replayed",
        "capture/hooks.py",
        "                len(args) > 1 or kwargs\n",
        "                False\n",
    ),
    Mutant(
        "param groups that a broken turn added stay",
        "resuming.py",
        "        remove_later_groups(live.census, live.keyed)\n",
        "",
    ),
    Mutant(
        "gradients of parameters in no optimizer are not recorded",
        "capture/pending.py",
        ", live.in_no_optimizer]",
        ", ()]",
    ),
    Mutant(
        "a log that begins behind a gap is counted on",
        "shadow/logkeeper.py",
        "            if first > reached:",
        "            if False:",
    ),
    Mutant("a zombie removes what its successor wrote", "store/term.py", *_CARRY_OUT),
    Mutant(
        "a shadow that comes late to its claim takes the run away",
        "store/runs.py",
        "        if others:\n            raise Fenced(",
        "        if False:\n            raise Fenced(",
    ),
    Mutant(
        "a shadow that failed at a record throws the next one away",
        "shadow/intake.py",
        "        held, self._held = self._held, []",
        "        held = self._held",
        also=(
            Change(
                "shadow/intake.py",
                "            self.on_record(seal_of(entries), entries)\n",
                "            self.on_record(seal_of(entries), entries)\n        self._held = []\n",
            ),
        ),
    ),
    Mutant(
        "residuals of parameters that came between two steps are not recorded",
        "compression/compressor.py",
        "                compressor.residual(parameter)\n",
        "                pass\n",
    ),
    Mutant(
        "residuals of groups that were given back do not come back",
        "resuming.py",
        """            live = self._timed("census", recorder.subject.census)\n        versions""",
        "            pass\n        versions",
    ),
    Mutant(
        "a shadow that is started while training is rewound claims the run for the line that was left",
        "recorder.py",
        "        self.drop()\n        self.link.starter.abandon()\n",
        "        self.drop()\n",
    ),
    Mutant(
        "a step counts whose seal was interrupted",
        "recorder.py",
        "            self.step -= 1\n",
        "            pass\n",
    ),
    Mutant(
        "residuals of param groups that a broken turn added stay",
        "recover/groups.py",
        "                    forget_residual(optimizer, parameter)\n",
        "",
    ),
    Mutant(
        "a log that is handed on is unscaled where it lies",
        "replay/apply.py",
        "(bool(call.amp) or rewrites_gradients(optimizer))",
        "rewrites_gradients(optimizer)",
    ),
    Mutant(
        "user state that was loaded has no room, and nobody makes it before the next seal",
        "recorder.py",
        "        self.link.starter.make_room(len(sealed.state))",
        "        pass",
        also=(
            Change(
                "recorder.py",
                "            self._seal_now()\n            self._change_if_outgrown()\n",
                "            self._seal_now()\n",
            ),
        ),
    ),
    Mutant(
        "attributes under odd names come from no store",
        "replay/optimizers.py",
        "not isinstance(name, str) or not is_text(name)",
        "not isinstance(name, str) or not name.isidentifier()",
    ),
    Mutant(
        "a step that is sealed again has the versions of the next one",
        "capture/tap.py",
        "        record.begin(step)  # sealed again",
        "        pass  # sealed again",
        also=(
            Change(
                "capture/tap.py",
                "            record.states.forget()  # all of it goes with the base\n",
                "",
            ),
        ),
    ),
]


def plant(mutant: Mutant, folder: Path) -> Path:
    """A copy of the sources with the mutant in it."""
    target = folder / "src"
    shutil.copytree(ROOT / "src", target, ignore=shutil.ignore_patterns("__pycache__"))
    for change in mutant.changes:
        path = target / "everystep" / change.file
        text = path.read_text()
        if (found := text.count(change.old)) != change.times:
            raise LookupError(
                f"mutant {mutant.name!r}: {found} times in {change.file}, expected {change.times}"
            )
        path.write_text(text.replace(change.old, change.new))
    return target


class Drawn(NamedTuple):
    """Which programs: `n` of them from `seed` on, `jobs` at a time, around the parts of `only`."""

    n: int
    seed: int
    jobs: int
    only: str = ""


def hunt(names: list[str], drawn: Drawn) -> int:
    """Print within how many programs each mutant is found; 1 if one is not."""
    chosen = [m for m in MUTANTS if not names or any(name in m.name for name in names)]
    baseline = _Baseline(drawn.only)
    missed = 0
    for mutant in chosen:
        if why := mutant.hidden():
            print(f"{mutant.name}: not hunted: {why}", flush=True)
            continue
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="st-") as folder:
            found = _find(plant(mutant, Path(folder)), baseline, drawn)
        seconds = time.monotonic() - began
        told = f"{found[0]} programs ({found[1]})" if found else f"NOT within {drawn.n}"
        print(f"{mutant.name}: {told}, {seconds:.0f} s", flush=True)
        missed += not found
    return int(missed > 0)


def _find(sources: Path, baseline: _Baseline, drawn: Drawn) -> tuple[int, str] | None:
    with contextlib.closing(_verdicts(sources, drawn)) as verdicts:
        for program, kind in verdicts:
            if kind and not kind.startswith("storm:") and kind != baseline.kind(program):
                return program - drawn.seed + 1, kind
    return None


class _Baseline:
    """How programs fail on the sources as they are. Remembers: it is asked for every mutant."""

    def __init__(self, only: str) -> None:
        self._only = only
        self._known: dict[int, str] = {}

    def kind(self, program: int) -> str:
        if program not in self._known:
            self._known |= dict(_verdicts(ROOT / "src", Drawn(1, program, 1, self._only)))
        return self._known[program]


def _verdicts(sources: Path, drawn: Drawn) -> Iterator[tuple[int, str]]:
    """Programs and how they failed, as they come; who has seen enough closes it."""
    words = [f"--{name}={value}" for name, value in drawn._asdict().items()]
    storm = subprocess.Popen(
        [sys.executable, "-m", "tests.storm", *words, "--json"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(sources)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert storm.stdout is not None
    try:
        for line in storm.stdout:
            verdict = json.loads(line)
            yield verdict["seed"], verdict["kind"]
    finally:
        storm.send_signal(signal.SIGINT)  # it ends the programs that it has begun
        storm.stdout.close()
        storm.wait(_END_SECONDS)


_END_SECONDS = 120.0
