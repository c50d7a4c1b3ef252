"""The newest valid point of a run: in the memory of a living shadow, or in the store."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from everystep.core.census import Census
from everystep.core.events import Seal
from everystep.core.tensors import Held
from everystep.errors import (
    DescriptorsRefused,
    EverystepError,
    NothingToRecover,
    ProtocolMismatch,
    StepUnavailable,
    StoreError,
    UnknownVersion,
)
from everystep.format.base import Base, Point, SessionValues, after_seal
from everystep.format.entry import unframe_entries
from everystep.format.planes import check_readable
from everystep.lane import control
from everystep.lane.arena import SharedMemory
from everystep.lane.descriptors import receive_descriptors
from everystep.lane.host import process_state
from everystep.lane.protocol import PROTOCOL, versions
from everystep.lane.runtime import ShadowCard, is_alive
from everystep.process.last_words import last_words
from everystep.recover.meet import shadow_of
from everystep.store.bases import BaseReader, read_base
from everystep.store.log_reader import LogReader, read_log
from everystep.store.reach import describe_reachable, reachable, whole_bases
from everystep.store.runs import Candidate, Lineage, identify, read_lineage

log = logging.getLogger(__name__)

_YIELD_SECONDS = 120.0
_SILENT_SECONDS = 5.0
_SUCCESSOR_SECONDS = 1.0
_CHECKERS = 4  # threads: nobody trains yet


class RestorePoint(NamedTuple):
    """A whole state at one step, ready to be loaded."""

    point: Point
    source: str  # shadow | store
    census: Census
    session: SessionValues
    tensors: Callable[[], Iterator[Held]]
    tail: memoryview
    tail_steps: int
    problems: list[str]
    log: LogReader | tuple[()] = ()  # records behind the state, still to be replayed
    handle: control.ReplicaHandle | None = None
    memory: tuple[SharedMemory, ...] = ()
    finished: int | None = None  # the newest step that training had finished, if a shadow knows

    @property
    def line(self) -> Point | None:
        """What whoever goes on from here continues."""
        return self.point if self.handle is None else self.handle.line

    @property
    def lost_steps(self) -> int | None:
        return None if self.finished is None else max(0, self.finished - self.point.step)

    def close(self) -> None:
        """Let go of a shadow's memory; whoever it was handed on to keeps its own hold."""
        for memory in self.memory:
            memory.close()


def resumed_line(run: str, found: RestorePoint) -> str:
    """What a person wants to know when training goes on."""
    census, lost = found.census, found.lost_steps
    how = "exact" if census.exactness == "exact" else f"{census.exactness}: {census.why}"
    line = f"resumed {run} at step {found.point.step} from the {found.source} ({how})"
    return line if lost is None else f"{line}; {lost} step{'' if lost == 1 else 's'} lost"


def find_newest(
    run: Path,
    folder: Path | None,
    step: int | None = None,
    *,
    exact: bool = False,
    verify_lazily: bool = False,
) -> tuple[RestorePoint | None, ShadowCard | None]:
    """The newest point (or the one at `step`), and the card of the shadow that lives, if any. `exact`: not
    one whose log lacks something. `verify_lazily`: who loads it can begin again if a record is damaged, so
    records are checked when their turn comes and not now."""
    card = shadow_of(run, folder) if folder else None
    problems: list[str] = []
    lineage = Lineage("", [], [])
    known = identify(run)[0] is not None
    found = held = in_memory = None
    finished: list[int] = []
    if card is not None and folder is not None:
        found, card, held = _from_living(card, run, folder, problems, finished)
        known = identify(run)[0] is not None
    if known:  # read after asking: a shadow that went meanwhile has left its last words there
        lineage = read_lineage(run)
    if found is not None:
        newest = lineage.candidates[0].entry.step if lineage.candidates else -1
        if found.point.step == step or (step is None and found.point.step >= newest):
            problems += lineage.problems
            last = max(finished, default=None)
            return found._replace(finished=last, problems=problems), card
        in_memory = found.point.step
        found.close()
    verify_lazily = verify_lazily and step is None
    damage = list(lineage.problems)
    stored = _from_store(run, lineage, damage, step, exact, verify_lazily)
    problems += damage
    if stored is None and step is None and damage:
        _refuse_damaged(run, damage)
    if held is not None and step is None:
        _check_last_words(run, stored, held, problems)
    if stored is None and step is not None:
        _refuse_unknown_step(run, lineage, step, in_memory)
    if stored is not None:
        stored = stored._replace(finished=max(finished, default=None), problems=problems)
    return stored, card


def _refuse_damaged(run: Path, damage: list[str]) -> None:
    """To begin anew where steps were recorded is for the user to decide."""
    first = damage[0].partition("\n")[0]
    more = f", and {len(damage) - 1} more" if len(damage) > 1 else ""
    raise NothingToRecover(
        f"resume {run}: no step in it is whole; damaged: {first}{more}",
        hint=f"everystep verify {run} lists the damage; put files back from a copy, or move the directory "
        "away to begin at step 0",
    )


def _check_last_words(
    run: Path, stored: RestorePoint | None, held: int, problems: list[str]
) -> None:
    """What a shadow held and did not leave in the store is lost, and not in silence."""
    if stored is None:
        raise NothingToRecover(
            f"resume {run}: its shadow held step {held} and left nothing in the store "
            f"({'; '.join(problems)})",
            hint="to begin at step 0, attach again",
        )
    if stored.point.step < held:
        problems.append(
            f"the shadow held step {held} and left step {stored.point.step} in the store"
        )


def _from_living(
    card: ShadowCard, run: Path, folder: Path, problems: list[str], finished: list[int]
) -> tuple[RestorePoint | None, ShadowCard | None, int | None]:
    """Ask the run's shadow; one that hands over to its successor meanwhile is asked no longer. One that
    cannot hand over says its last words to the store: the third value is the step that should be there."""
    while True:
        own: list[str] = []
        try:
            found = _from_shadow(card, own, finished)
            now = shadow_of(run, folder) if found else _card_after(run, folder)
        except (ProtocolMismatch, DescriptorsRefused) as refusal:
            held = last_words(card, str(refusal))
            problems.append(
                f"{refusal}: the shadow wrote to the store and left; resuming from there"
            )
            return None, shadow_of(run, folder), held
        if found is not None or now is None or now.pid == card.pid:
            problems += own
            return found, now, None
        card = now


def _card_after(run: Path, folder: Path) -> ShadowCard | None:
    """The card to go on with: a shadow that retires leaves its successor a moment to write one."""
    deadline = time.monotonic() + _SUCCESSOR_SECONDS
    while (now := shadow_of(run, folder)) is None and time.monotonic() < deadline:
        time.sleep(0.01)
    return now


def _from_shadow(card: ShadowCard, problems: list[str], finished: list[int]) -> RestorePoint | None:
    if card.protocol != PROTOCOL:
        raise ProtocolMismatch(versions(f"shadow {card.pid}", card.protocol))
    try:
        answer = control.ask(
            card.control,
            control.AskYield(),
            timeout_seconds=_YIELD_SECONDS,
            alive=_Patience(card).alive,
        )
        if "finished_step" in answer.status:
            finished.append(answer.status["finished_step"])
        if answer.handle is None:
            problems.append(f"shadow {card.pid}: {answer.error}")
            return None
        handle = answer.handle
        count = handle.extents + (1 if handle.tail_bytes else 0)
        fds = receive_descriptors(card.descriptors, count)
    except (ProtocolMismatch, DescriptorsRefused):
        raise
    except EverystepError as error:
        problems.append(f"shadow {card.pid}: {error}")
        return None
    memory = tuple(SharedMemory(fd) for fd in fds)

    def tensors() -> Iterator[Held]:
        for t in handle.places:
            yield t.at(t.place.of(memory[t.place.holder].view))

    tail = memory[-1].view[: handle.tail_bytes] if handle.tail_bytes else memoryview(b"")
    return RestorePoint(
        Point(handle.line.term if handle.line else 0, handle.step),
        "shadow",
        handle.census,
        handle.session,
        tensors,
        tail,
        handle.tail_steps,
        problems,
        handle=handle,
        memory=memory,
    )


class _Patience:
    """Tells who waits for a shadow, once it takes longer than anybody expects."""

    def __init__(self, card: ShadowCard) -> None:
        self._card = card
        self._began: float | None = time.monotonic()

    def alive(self) -> bool:
        waited = 0.0 if self._began is None else time.monotonic() - self._began
        if waited > _SILENT_SECONDS:
            pid, self._began = self._card.pid, None
            until = time.strftime("%H:%M:%S", time.localtime(time.time() + _YIELD_SECONDS - waited))
            stopped = (
                f"it is stopped, kill -CONT {pid} wakes it" if process_state(pid) == "T" else ""
            )
            log.warning(
                "waiting until %s for shadow %d to hand over its state; then the store is used%s",
                until,
                pid,
                f" ({stopped})" if stopped else "",
            )
        return is_alive(self._card)


def _from_store(
    run: Path,
    lineage: Lineage,
    problems: list[str],
    step: int | None,
    exact: bool,
    verify_lazily: bool,
) -> RestorePoint | None:
    """The newest base whose every byte is right, and what the log holds behind it; damaged ones are named and
    passed over. A step that is wanted may lie in the log."""
    wanted = [c for c in whole_bases(lineage) if step is None or c.entry.step <= step]
    for candidate in wanted:
        try:
            base = read_base(run, candidate)
            lacking = any(atom.lossy for atom in base.census.atoms)
            until = candidate.entry.step if exact and lacking else step
            reader, behind = _read(run, lineage, candidate, base, until, check=not verify_lazily)
            session, tail = reader.session(), reader.tail()
        except UnknownVersion:
            raise
        except StoreError as error:
            log.warning("base_skipped step=%d error=%s", candidate.entry.step, error)
            problems.append(str(error))
            continue
        if step is None or behind.end.step == step:
            problems += behind.problems
            if lacking and behind.end.step > candidate.entry.step:
                problems.append(
                    f"step {behind.end.step}: weights and optimizers are exact, residuals of compression are "
                    f'those of step {candidate.entry.step} (tuning=Tuning(residuals="exact") resumes '
                    "there instead)"
                )
            return _found_base(reader, session, tail, behind, problems)
    return None


def _refuse_unknown_step(run: Path, lineage: Lineage, step: int, in_memory: int | None) -> None:
    """Say which steps can be had; a base of this one that is damaged is the caller's to tell."""
    if any(c.entry.step == step for c in whole_bases(lineage)):
        return
    bases, steps = reachable(run, lineage)
    others = describe_reachable(bases, steps, in_memory)
    if step in steps:
        raise StepUnavailable(
            f"step {step} of {run}: the log before it is damaged",
            hint=f"everystep verify says where; damage aside, {others}",
        )
    if any(c.entry.step == step for c in lineage.candidates):
        raise StepUnavailable(
            f"step {step} of {run}: only its weights are retained, not its optimizer slots",
            hint=f"everystep export gives the weights; {others}",
        )
    raise StepUnavailable(f"step {step} of {run}: not retained", hint=others)


def _read(
    run: Path,
    lineage: Lineage,
    candidate: Candidate,
    base: Base,
    until: int | None,
    *,
    check: bool,
) -> tuple[BaseReader, LogReader]:
    """A base and the log behind it at the same time, that one checked or not."""
    read = read_log if check else LogReader
    with ThreadPoolExecutor(1, "everystep-log") as beside:
        behind = beside.submit(read, run, lineage, candidate.point, base.census, until)
        return BaseReader(run, base, threads=_CHECKERS), behind.result()


def _found_base(
    reader: BaseReader,
    session: SessionValues,
    tail: memoryview,
    behind: LogReader,
    problems: list[str],
) -> RestorePoint:
    for record in behind.glance():
        for events, _ in unframe_entries(record.body):
            check_readable(events)  # before anything live is changed
            for event in events:
                session = after_seal(session, event) if isinstance(event, Seal) else session
    behind.bring()
    return RestorePoint(
        behind.end,
        "store",
        reader.base.census,
        session,
        reader.tensors,
        tail,
        reader.base.tail_steps,
        problems,
        log=behind,
    )
