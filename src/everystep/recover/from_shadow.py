"""The point that a living shadow holds: asked for, and mapped where the shadow can hand it over."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from everystep.core.tensors import Held
from everystep.errors import DescriptorsRefused, EverystepError, ProtocolMismatch
from everystep.format.base import Point
from everystep.lane import control
from everystep.lane.arena import SharedMemory
from everystep.lane.descriptors import receive_descriptors
from everystep.lane.host import process_state
from everystep.lane.protocol import PROTOCOL, versions
from everystep.lane.runtime import ShadowCard, is_alive
from everystep.process.last_words import last_words
from everystep.recover.meet import shadow_of
from everystep.recover.point import RestorePoint

log = logging.getLogger(__name__)

_YIELD_SECONDS = 120.0
_SILENT_SECONDS = 5.0
_SUCCESSOR_SECONDS = 1.0


@dataclass
class Answer:
    """What came of asking."""

    card: ShadowCard | None  # of the shadow that lives now
    found: RestorePoint | None = None
    last_words: int | None = None  # the step that should be in the store; it could not hand over
    finished: int | None = None  # the newest step that training had finished
    problems: list[str] = field(default_factory=list)


def ask_shadow(card: ShadowCard, run: Path, folder: Path) -> Answer:
    """Ask the run's shadow for its state. A shadow that hands over to a successor meanwhile is not asked
    again. A shadow that cannot hand over writes its last words to the store."""
    answer = Answer(card)
    while True:
        problems: list[str] = []
        try:
            answer.found = _from_shadow(card, problems, answer)
            now = shadow_of(run, folder) if answer.found else _card_after(run, folder)
        except (ProtocolMismatch, DescriptorsRefused) as refusal:
            answer.last_words = last_words(card, str(refusal))
            told = f"{refusal}: the shadow wrote to the store and left; resuming from there"
            answer.problems.append(told)
            answer.card = shadow_of(run, folder)
            return answer
        if answer.found is not None or now is None or now.pid == card.pid:
            answer.card = now
            answer.problems += problems
            return answer
        card = now


def _card_after(run: Path, folder: Path) -> ShadowCard | None:
    """The card to go on with: a shadow that retires leaves its successor a moment to write one."""
    deadline = time.monotonic() + _SUCCESSOR_SECONDS
    while (now := shadow_of(run, folder)) is None and time.monotonic() < deadline:
        time.sleep(0.01)
    return now


def _from_shadow(card: ShadowCard, problems: list[str], told: Answer) -> RestorePoint | None:
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
            told.finished = max(told.finished or 0, answer.status["finished_step"])
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
    return _mapped(handle, tuple(SharedMemory(fd) for fd in fds))


def _mapped(handle: control.ReplicaHandle, memory: tuple[SharedMemory, ...]) -> RestorePoint:
    def tensors() -> Iterator[Held]:
        for t in handle.places:
            yield t.at(t.place.of(memory[t.place.holder].view))

    return RestorePoint(
        Point(handle.line.term if handle.line else 0, handle.step),
        "shadow",
        handle.census,
        handle.session,
        tensors,
        memory[-1].view[: handle.tail_bytes] if handle.tail_bytes else memoryview(b""),
        handle.tail_steps,
        [],
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
