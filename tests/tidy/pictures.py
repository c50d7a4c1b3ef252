"""Draws docs/STATES.md from the source: `python -m tests.tidy.pictures` writes it, a test compares it."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from everystep.core import phases, roles
from everystep.lane import ring

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "STATES.md"
_MEMBER = re.compile(r'^    [A-Z_]+ = "(\w+)"  # (.+)$', re.MULTILINE)

_FRAME = """# States

Drawn from the source by `make fix`. `make check` fails where it is out of date. Nobody edits it by hand.

## The way of a record

Each box is a function. An arrow is a call in its source, a dotted one what the next thread or process reads.

{way}

## A slot of the ring

`src/everystep/lane/ring.py` says who moves it on.

{slot}

## Recording, in the trainer

`src/everystep/core/phases.py` has the table; `src/everystep/capture/record.py` alone changes the phase.

{phases}

## A shadow

`src/everystep/core/roles.py` has the table; `src/everystep/shadow/succession.py` alone changes the role.
A shadow that is leaving leaves, whatever comes.

{roles}
"""


# ---------------------------------------------------------------------- machines


def machine(
    states: type[StrEnum],
    events: type[StrEnum],
    table: Mapping[tuple[StrEnum, StrEnum], StrEnum],
    first: StrEnum,
) -> str:
    """A diagram of what leads from state to state, and tables of all there is."""
    arrows: dict[tuple[str, str], list[str]] = {}
    for (state, event), following in table.items():
        if state is not following:
            arrows.setdefault((state, following), []).append(event)
    drawn = [f"    {a} --> {b}: {', '.join(said)}" for (a, b), said in arrows.items()]
    meanings, causes = _comments(states), _comments(events)
    rows = [f"| `{state}` | {meanings[state]} | {_next(state, table)} |" for state in states]
    return "\n".join(
        [
            "```mermaid",
            "stateDiagram-v2",
            f"    [*] --> {first}",
            *drawn,
            "```",
            "",
            "| state | meaning | event → next state |",
            "|---|---|---|",
            *rows,
            "",
            "| event | meaning |",
            "|---|---|",
            *(f"| `{event}` | {causes[event]} |" for event in events),
        ]
    )


def _comments(kind: type[StrEnum]) -> dict[str, str]:
    """What stands behind each member in the source."""
    found = dict(_MEMBER.findall(inspect.getsource(kind)))
    missing = [str(member) for member in kind if member not in found]
    assert not missing, f"{kind.__name__}: no comment on the line of {', '.join(missing)}"
    return found


def _next(state: StrEnum, table: Mapping[tuple[StrEnum, StrEnum], StrEnum]) -> str:
    ways = [(event, following) for (from_, event), following in table.items() if from_ is state]
    return "<br>".join(f"`{e}` → {'stays' if f is state else f}" for e, f in ways) or "none"


def slot() -> str:
    """The picture in the ring's own docstring."""
    (picture,) = re.findall(r"\n\n((?: {4}.*\n)+)\n", ring.__doc__ or "")
    return "```\n" + inspect.cleandoc("\n" + picture) + "\n```"


# ---------------------------------------------------------------------- the way of a record


class Station(NamedTuple):
    file: str  # from src/everystep on
    function: str
    does: str


HOOK = Station("capture/hooks.py", "StepHooks._log_call", "before a step")
CALL = Station("capture/calls.py", "CallLog.log", "gradients and group values")
TAP = Station("capture/tap.py", "Tap._send", "at the seal: edits, a slice of a base")
SEAL = Station("capture/seals.py", "SealSender.send", "random states, user state")
OUTBOX = Station("capture/outbox.py", "Outbox._publish", "fills slots")
RING = Station("lane/ring.py", "RingWriter.publish", "commit words")
READ = Station("lane/ring.py", "RingReader.read", "an entry, where it lies")
INTAKE = Station("shadow/intake.py", "Intake._read", "whole records")
ARRIVED = Station("shadow/intake.py", "Intake._record_arrived", "a seal is there")
REPLAY = Station("shadow/intake.py", "Intake._replay", "as many as one pass takes")
REPLICA = Station("shadow/replica_state.py", "ReplicaState.replay", "the target")
ENGINE = Station("replay/engine.py", "Engine._apply", "event by event")
BASE = Station("shadow/base_scheduler.py", "BaseScheduler._write", "a snapshot, when due")
WRITER = Station("shadow/base_writer.py", "BaseWriter._write", "a thread")
COMMIT = Station("store/term.py", "TermWriter.commit", "base, then manifest")
PERSIST = Station("shadow/persistence.py", "Persistence.on_record", "with durable_log")
KEEPER = Station("shadow/logkeeper.py", "LogKeeper._write", "a thread, in batches")
LOG = Station("store/log.py", "LogWriter.append", "a segment")
SHIP = Station("store/bucket/ship.py", "BaseShipper.turn", "a thread: files, then a commit")
SHIP_LOG = Station("store/bucket/ship_log.py", "LogShipper.turn", "a thread: parts")

PLACES = {
    "trainer": (HOOK, CALL, TAP, SEAL, OUTBOX, RING),
    "shadow": (READ, INTAKE, ARRIVED, REPLAY, REPLICA, ENGINE, PERSIST, BASE),
    "store": (WRITER, COMMIT, KEEPER, LOG),
    "bucket": (SHIP, SHIP_LOG),
}
# from, what stands there in the source, to
CALLS = (
    (HOOK, "calls.log(", CALL),
    (CALL, "_outbox.room(", OUTBOX),
    (TAP, "seals.send(", SEAL),
    (SEAL, "outbox.seal(", OUTBOX),
    (OUTBOX, "_ring.publish(", RING),
    (INTAKE, "ring.read(", READ),
    (INTAKE, "_hold(", ARRIVED),
    (ARRIVED, "on_record(", PERSIST),
    (REPLAY, "state.replay(", REPLICA),
    (REPLICA, "_engine.apply(", ENGINE),
    (BASE, "_base_writer.start(", WRITER),
    (WRITER, "_writer.commit(", COMMIT),
    (PERSIST, "log.offer(", KEEPER),
    (KEEPER, "_writer.append(", LOG),
)
# from, what lies between, to: nobody calls, the next one looks
HANDS_OVER = (
    (RING, "shared memory", INTAKE),
    (ARRIVED, "a queue", REPLAY),
    (ENGINE, "the replica", BASE),
    (COMMIT, "the directory", SHIP),
    (LOG, "the directory", SHIP_LOG),
)


def way() -> str:
    for station, call, _ in CALLS:
        assert call in _source(station), f"{station.file}: {station.function} has no {call!r}"
    names = {station: f"s{i}" for i, station in enumerate(sum(PLACES.values(), ()))}
    lines = ["```mermaid", "flowchart TD"]
    for place, stations in PLACES.items():
        lines.append(f"    subgraph {place}")
        for station in stations:
            _source(station)
            text = f"{station.function}<br>{station.file}<br>{station.does}"
            lines.append(f'        {names[station]}["{text}"]')
        lines.append("    end")
    lines += [f"    {names[a]} --> {names[b]}" for a, _, b in CALLS]
    lines += [f"    {names[a]} -. {what} .-> {names[b]}" for a, what, b in HANDS_OVER]
    return "\n".join([*lines, "```"])


def _source(station: Station) -> str:
    """The function's own; complains if it is gone."""
    text = (ROOT / "src" / "everystep" / station.file).read_text()
    body: list[ast.stmt] = ast.parse(text).body
    for name in station.function.split("."):
        named = [
            n for n in body if isinstance(n, ast.ClassDef | ast.FunctionDef) and n.name == name
        ]
        assert named, f"{station.file}: no {station.function}, put its new place into {__file__}"
        node, body = named[0], named[0].body
    return ast.get_source_segment(text, node) or ""


def document() -> str:
    return _FRAME.format(
        way=way(),
        slot=slot(),
        phases=machine(phases.Phase, phases.Cause, phases.TRANSITIONS, phases.Phase.OPENING),
        roles=machine(roles.Role, roles.RoleEvent, roles.TABLE, roles.Role.FOLLOWING),
    )


if __name__ == "__main__":
    DOCUMENT.write_text(document())
