"""Judges what a program's lives told against its reference: pure, and the only place that knows the promises.

Nothing between: every state ever shown is the reference's in every bit, a run comes back where it was
promised to, whatever went wrong was said in the trainer; or attach refused, saying what to do.
"""

from __future__ import annotations

import math
import re
from itertools import pairwise
from typing import Any, NamedTuple

from exact.compare import differences

from storm.draw import PARTS, tags_of
from storm.looking import CATEGORIES
from storm.program import Program
from storm.runner import Life, Outcome

_SLOTS_FEW = 48  # a ring of a small model has more slots: fewer steps than this never fill it
_LATER_TURNS = 3  # after which a warning must have come
_HITS = {
    "shadow_hit",
    "disk_hit",
    "clock_hit",
    "store_hit",
    "host",
    "in_attach",
    "moved",
    "deleted",
}


class Failure(NamedTuple):
    """`kind` names the class: programs that fail alike have one cause until shown otherwise."""

    kind: str
    detail: str


class Verdict(NamedTuple):
    failures: list[Failure]
    refused: str = ""  # by attach, in words: not a failure

    @property
    def kind(self) -> str:
        return self.failures[0].kind if self.failures else ""


def judge(program: Program, outcome: Outcome) -> Verdict:
    """Failures, the gravest first."""
    reference = outcome.reference
    if reference.ended != "closed":
        return _judge_reference(reference)
    first = outcome.lives[0]
    if first.ended == "raised" and not first.all("attached"):
        error = _error_of(first)
        if error is not None and error["known"]:
            said = f"{error['type']}: {error['text']}"
            bare = (
                [] if error["hint"] else [Failure(f"refused without a hint: {error['type']}", said)]
            )
            return Verdict(bare, said)
    failures = [
        *_accepted(program, outcome),
        *_wrong_bits(program, outcome),
        *_wrong_turns(program, outcome),
        *_lost_steps(program, outcome),
        *_raised(program, outcome),
        *_hung(outcome),
        *_degraded(program, outcome),
    ]
    return Verdict(failures)


def _judge_reference(reference: Life) -> Verdict:
    error = _error_of(reference)
    if error is not None and error["known"]:
        return Verdict([], f"{error['type']}: {error['text']}")
    said = f"{error['type']}: {error['text']} in {error['place']}" if error else reference.ended
    return Verdict([Failure(f"generator: {said[:60]}", said + reference.errors[-1500:])])


def _error_of(life: Life) -> dict[str, Any] | None:
    raised = life.all("raised")
    return raised[-1]["error"] if raised else None


def _accepted(program: Program, outcome: Outcome) -> list[Failure]:
    """A life that went on although attach had to refuse."""
    tags = tags_of(program)
    for before, life in pairwise(outcome.lives):
        if life.all("fresh"):
            break
        resumed = [e["step"] for e in life.all("attached")]
        told = f"life {life.number} went on from step {resumed}"
        if resumed and "other_class" in tags:
            return [Failure("another optimizer class was accepted", told)]
        if resumed and "deleted" in before.after:
            return [Failure("a deleted run came back", told)]
    return []


# ---------------------------------------------------------------------- bits


def _wrong_bits(program: Program, outcome: Outcome) -> list[Failure]:
    """What is shown after resuming and after every turn is what the reference showed there."""
    expected = {e["step"]: e["seen"] for e in outcome.reference.all("done")}
    begin = outcome.reference.all("attached")[0]["seen"]
    end = outcome.reference.all("end")[0]["seen"]
    excused = _first_excused(program, outcome)
    for life in outcome.lives:
        for event in life.events:
            step = event["step"]
            if _may_excuse(program) and _was_never_sealed(event, life):
                continue  # what excuses it would have been told at the seal
            if life.number > excused or (life.number == excused and event["kind"] != "attached"):
                continue
            if event["kind"] == "attached" and not step and excused < math.inf:
                continue  # who never tells that a loop begins has begun it before anybody looked
            if event["kind"] == "attached" and (life.number or step):
                where, known = "at resume", {**begin, **expected.get(step - 1, {})}
            elif event["kind"] == "done":
                where, known = "after a turn", expected[step]
            elif event["kind"] == "end":
                where, known = "at the end", end if life.all("turn") else {**end, "random": None}
            else:
                continue
            if found := _differing(known, event["seen"], where):
                detail = f"life {life.number}, step {step}, {where}:\n  " + "\n  ".join(found[1])
                return [Failure(found[0], detail)]
    return []


def _differing(
    known: dict[str, Any], seen: dict[str, Any], where: str
) -> tuple[str, list[str]] | None:
    for category in CATEGORIES:
        if known.get(category) is not None and category in seen:
            lines = differences(known[category], seen[category], category)
            if lines:
                return f"wrong bits: {category} {where}", lines[:6]
    return None


def _may_excuse(program: Program) -> list[str]:
    return [words for r, p in program.picks() if (words := PARTS[r][p.name].excused_by)]


def _was_never_sealed(event: dict[str, Any], life: Life) -> bool:
    """The last turn of a life that was killed behind it."""
    seen = [e for e in life.events if e["kind"] in ("turn", "done", "end")]
    return life.ended == "killed" and event is seen[-1] if seen else False


def _first_excused(program: Program, outcome: Outcome) -> float:
    """Some things cannot be made right, and are warned about: the life in which bits may differ once it has
    resumed; those after it may resume what differs."""
    words = _may_excuse(program)
    warned = (
        life.number
        for life in outcome.lives
        for event in life.all("warned")
        if any(re.search(word, event["text"]) for word in words)
    )
    if "other_class" in tags_of(program):  # who begins anew does so with the other class
        return 0.5
    return max(1, min(warned, default=math.inf))


# ---------------------------------------------------------------------- turns


def _wrong_turns(program: Program, outcome: Outcome) -> list[Failure]:
    """Each turn follows the one before, and none comes twice unless the program went back. A shadow that
    cannot write may be unable to give a broken turn's start back: then it is told where training is."""
    told_where = (
        re.compile(r"training is back at step (\d+)") if "disk_hit" in tags_of(program) else None
    )
    for life in outcome.lives:
        expected: int | None = None
        for event in life.events:
            if event["kind"] == "fresh":
                expected = None
            elif event["kind"] in ("attached", "again"):
                expected = event["step"]
            elif (
                event["kind"] == "warned"
                and told_where
                and (at := told_where.search(event["text"]))
            ):
                expected = int(at[1])
            elif event["kind"] == "turn":
                if expected is not None and event["step"] != expected:
                    turns = [e["step"] for e in life.all("turn")]
                    told = f"life {life.number}: turns {turns[:12]}, expected {expected}"
                    return [Failure("wrong turns", told)]
                expected = event["step"] + 1
    return []


# ---------------------------------------------------------------------- steps


class _Promise:
    """How far a run must come back: after the death of the trainer, and of everything."""

    def __init__(self, program: Program) -> None:
        tags = tags_of(program)
        self._program = program
        self._values = {p.name: p.values.get("v") for p in program.options}
        self._rests = "rests" in tags
        self._hit = bool(tags & {"shadow_hit", "disk_hit", "store_hit"})
        self._skips = "skips" in tags
        self.trainer = self.all = 0

    def after(self, life: Life, lost: bool) -> None:
        """Lost: the life began further back than promised, which was told already."""
        attached = life.all("attached")
        if not attached:  # it died while it resumed: nothing has changed
            return
        begin = attached[-1]["step"]
        if lost:
            self.trainer = self.all = begin
        sealed, done = begin, begin
        for event in life.events:
            if event["kind"] == "again":
                self.all = min(self.all, event["step"])
                sealed = done = event["step"]
            elif event["kind"] == "turn":
                sealed = event["step"]
            elif event["kind"] == "done":
                done = event["step"] + 1
            elif event["kind"] == "status":
                self.all = max(self.all, event["status"].get("durable_step") or 0)
        warned = any(not _is_told(self._program, e["text"]) for e in life.all("warned"))
        if life.ended == "closed":
            kept = done - 1 if self._skips and not life.all("end") else done
            self.trainer = self.all = self.all if warned else max(kept, 0)
        elif self._keeps_every_step(done - begin) and not warned:
            self.trainer = max(sealed, self.all)
        else:
            self.trainer = self.all
        if life.host_lost:
            self.trainer = self.all

    def _keeps_every_step(self, steps: int) -> bool:
        waits = self._values.get("on_lag") == '"wait"'
        return not self._hit and not self._rests and (waits or steps < _SLOTS_FEW)


def _lost_steps(program: Program, outcome: Outcome) -> list[Failure]:
    """Each life begins no further back than the faults before it explain, and not ahead of what was done."""
    promise, furthest, damaged = _Promise(program), 0, False
    for life in outcome.lives:
        lost = False
        for attached in [*life.all("fresh"), *life.all("attached")]:
            step = attached["step"]
            told = f"life {life.number} began at {step}, promised was {promise.trainer}"
            excused = damaged and (life.all("warned") or promise.trainer - step <= 0)
            if step > furthest:
                return [Failure("resumed ahead", f"{told}, done were {furthest}")]
            if step < promise.trainer and not excused:
                kind = "began anew" if attached["kind"] == "fresh" else "lost steps"
                by = "host" if outcome.lives[life.number - 1].host_lost else "trainer"
                after = "".join(f" and {what}" for what in outcome.lives[life.number - 1].after)
                return [Failure(f"{kind}: {by} lost{after}", told)]
            lost |= step < promise.trainer
        promise.after(life, lost)
        damaged |= "flip" in life.after
        if "deleted" in life.after:
            promise.trainer = promise.all = 0
        furthest = max([furthest, *(e["step"] + 1 for e in life.all("done"))])
    return []


# ---------------------------------------------------------------------- errors


def _raised(program: Program, outcome: Outcome) -> list[Failure]:
    tags = tags_of(program)
    for life in outcome.lives:
        error = _error_of(life)
        if error is None:
            continue
        detail = f"life {life.number}: {error['type']}: {error['text']} in {error['place']}"
        if not error["known"]:
            return [
                Failure(
                    f"raised: {error['type']} in {error['place']}",
                    f"{detail}\n{life.errors[-1500:]}",
                )
            ]
        if not life.all("attached"):
            if tags & {"store_hit", "retyped", "deleted", "other_class"} and error["hint"]:
                continue
            return [Failure(f"refused to resume: {error['type']} in {error['place']}", detail)]
        names = {pick.name for _, pick in program.picks()}
        # these raise what goes wrong
        wants_it = "on_failure" in names or "goes_back" in tags or "flush" in str(program)
        by_itself = {"shadow_hit"} if "rewind_lost" in names else set()  # which it has to bear
        if not (wants_it and tags & ({*_HITS, "rests"} - by_itself)):
            return [Failure(f"raised: {error['type']} in {error['place']}", detail)]
    return []


def _hung(outcome: Outcome) -> list[Failure]:
    for life in outcome.lives:
        if life.ended == "hung":
            frames = re.findall(r'File "([^"]+)", line (\d+) in (\w+)', life.errors)
            ours = [f"{p.rpartition('/')[2]}:{n}" for p, _, n in frames if "/everystep/" in p]
            where = ours[-1] if ours else "unknown"
            return [Failure(f"hung: {where}", f"life {life.number}\n{life.errors[-1500:]}")]
    return []


# ---------------------------------------------------------------------- health


def _degraded(program: Program, outcome: Outcome) -> list[Failure]:
    """What is wrong is said in the trainer; and without a fault nothing goes wrong."""
    hit = tags_of(program) & _HITS
    for life in outcome.lives:
        warned = [e for e in life.all("warned") if not _is_told(program, e["text"])]
        for place, event in enumerate(life.events):
            status = event.get("status") or {}
            age = status.get("durable_age_seconds")
            if age is not None and age < -1:
                return [Failure("status: an age below 0", f"life {life.number}: {age:.0f} s")]
            if status.get("health", "ok") == "ok":
                continue
            reason = status.get("problem", "")
            later = sum(e["kind"] == "turn" for e in life.events[place:])
            said = f"life {life.number}, step {event['step']}: {reason}"
            if not warned and (later >= _LATER_TURNS or life.all("end")):
                return [Failure(f"silent degradation: {_class_of(reason)}", said)]
            if not hit:
                return [Failure(f"degraded: {_class_of(reason)}", said)]
        if "rests" in tags_of(program):  # a step that was left unsealed hides the one before it
            warned = [e for e in warned if "and the step after it has begun" not in e["text"]]
        if warned and not hit:
            text = warned[0]["text"]
            return [
                Failure(f"warned without a fault: {_class_of(text)}", f"life {life.number}: {text}")
            ]
    return _shadow_failures(outcome, hit)


def _is_told(program: Program, text: str) -> bool:
    """A warning that belongs to what the program does."""
    words = [w for r, p in program.picks() if (w := PARTS[r][p.name].tells)]
    return any(re.search(word, text) for word in words)


def _shadow_failures(outcome: Outcome, hit: set[str]) -> list[Failure]:
    """Errors that the shadow wrote into its log."""
    found = re.search(
        r"shadow_(?:failed|died).*?\n(Traceback.*?\n)(\w[^\n]*)", outcome.shadow_log, re.S
    )
    if found is None or hit & {"disk_hit", "store_hit", "moved", "deleted"}:
        return []
    if found[2].endswith("planted"):  # by the program itself
        return []
    if found[2].startswith("BrokenPipeError"):  # its trainer was killed while it started
        return []
    places = re.findall(r'/everystep/([^"]+)", line \d+, in (\w+)', found[1])
    place = ":".join(places[-1]) if places else "unknown"
    warned = any(life.all("warned") for life in outcome.lives)
    how = "shadow failed" if warned else "silent degradation"
    return [Failure(f"{how}: {found[2].split(':')[0]} in {place}", found[0][-1500:])]


def _class_of(reason: str) -> str:
    """The words of a message without what differs from program to program."""
    text = re.sub(r"\S*/\S+", "PATH", reason)
    text = re.sub(r"0x[0-9a-f]+|\d+", "N", text)
    return text.splitlines()[0][:70] if text else "no reason"
