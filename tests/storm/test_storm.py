"""The storm itself: drawing and shrinking are pure, planted faults are found; a dozen holds."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator

import pytest

from storm.cli import Storm
from storm.draw import PARTS, cover, draw, is_valid
from storm.known import KNOWN, known
from storm.mutants import MUTANTS, ROOT
from storm.oracle import Failure
from storm.program import Pick, Program, from_json, to_json
from storm.render import source
from storm.script import script
from storm.shrink import essence, shrink

DRAWN = [draw(seed) for seed in range(700)]

SIMPLE = Program(
    seed=0,
    steps=6,
    model=Pick("mlp"),
    optimizer=Pick("adamw", {"groups": "params", "flags": ""}),
    turn=Pick("plain", {"zero": "end"}),
    loop=Pick("steps"),
    options=(Pick("on_lag", {"v": '"wait"'}),),
    faults=(Pick("kill", {"at": 4, "place": "start"}),),
)
DOZEN = cover(int(os.environ.get("EVERYSTEP_STORM", "12")))


@pytest.fixture(scope="module")
def storm() -> Iterator[Storm]:
    made = Storm()
    yield made
    made.close()


def test_drawing_is_a_pure_function_of_the_seed() -> None:
    for program in DRAWN[:200]:
        assert draw(program.seed) == program
        assert from_json(to_json(program)) == program
    assert len({to_json(program) for program in DRAWN}) == len(DRAWN)


def test_every_part_is_drawn_and_every_program_is_source() -> None:
    drawn = {(registry, pick.name) for program in DRAWN for registry, pick in program.picks()}
    assert drawn == {(registry, name) for registry, parts in PARTS.items() for name in parts}
    for program in DRAWN[:300]:
        assert is_valid(program), program
        text = source(program)
        ast.parse(text)
        assert "@zero" not in text and "$" not in text, text
    ast.parse(script(DRAWN[0], Failure("kind", "detail")))


def test_programs_can_be_drawn_around_a_part() -> None:
    nested = PARTS["optimizer"]["nested"]
    around = [draw(seed, frozenset(["nested", "durable_log"])) for seed in range(20)]
    for program in around:
        fits = not nested.bars & PARTS["model"][program.model.name].gives
        assert (program.optimizer.name == "nested") == fits, program
        assert "durable_log" in [option.name for option in program.options]
    assert sum(program.optimizer.name == "nested" for program in around) > 10


def test_shrinking_leaves_what_it_takes() -> None:
    def fails(program: Program) -> bool:
        killed = any(fault.name == "kill" for fault in program.faults)
        return killed and program.turn.name == "no_call" and program.steps > 5

    program = next(p for p in DRAWN if fails(p) and p.edits and p.states and len(p.faults) > 1)
    small = shrink(program, fails, tries=1000)
    assert fails(small) and is_valid(small)
    assert essence(small) == {"turn no_call", "faults kill"}
    assert small.steps == 6


def test_a_simple_program_holds(storm: Storm) -> None:
    verdict = storm.verdict(SIMPLE)
    assert not verdict.failures and not verdict.refused, verdict


WRONG_SLOT = """
from everystep.recover.loader import Loader
plain = Loader.load
def load(self, **given):
    versions = plain(self, **given)
    next(iter(self._live.optimizers[0].state.values()))["exp_avg"].view(-1)[-1] += 1e-7
    return versions
Loader.load = load
"""
LOST_STEP = """
import everystep.recover.attempts as attempts
attempts.find_newest = lambda *given, **more: (None, None)
"""
WRONG_RANDOM = """
import everystep.resuming as resuming
resuming.restore_rng = lambda states: None
"""
REPEATED_TURN = """
from everystep.loop import Steps
plain = Steps.__next__
Steps.__next__ = lambda self: max(0, plain(self) - 1)
"""


@pytest.mark.parametrize(
    ("plant", "kind"),
    [
        (WRONG_SLOT, "wrong bits: slots at resume"),
        (WRONG_RANDOM, "wrong bits: weights after a turn"),
        (LOST_STEP, "began anew: trainer lost"),
        (REPEATED_TURN, "wrong turns"),
    ],
    ids=["slot", "random", "lost", "repeated"],
)
def test_a_planted_fault_is_found(plant: str, kind: str, storm: Storm) -> None:
    assert kind in [failure.kind for failure in storm.verdict(SIMPLE, plant).failures]


def test_mutants_can_be_planted() -> None:
    for mutant in MUTANTS:
        for change in mutant.changes:
            text = (ROOT / "src" / "everystep" / change.file).read_text()
            assert text.count(change.old) == change.times, (
                f"{mutant.name}: not so often in {change.file}"
            )


def test_what_is_known_names_parts() -> None:
    names = {f"{registry} {name}" for registry, parts in PARTS.items() for name in parts}
    for entry in KNOWN:
        for word in entry.parts.replace("|", ",").split(","):
            assert not word.strip() or word.strip() in names, entry


@pytest.mark.parametrize("program", DOZEN, ids=[str(program.seed) for program in DOZEN])
def test_dozen(program: Program, storm: Storm) -> None:
    """The programs that have the most parts between them; EVERYSTEP_STORM says how many."""
    verdict = storm.verdict(program)
    if verdict.failures and (why := known(program, verdict.kind)):
        pytest.xfail(f"{verdict.kind}: {why}")
    told = script(program, verdict.failures[0]) if verdict.failures else ""
    assert not verdict.failures, f"{program}\n{told}"
