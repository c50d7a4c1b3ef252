"""`python -m tests.storm`: draw programs, run them, shrink and print those that fail."""

from __future__ import annotations

import argparse
import collections
import json
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from storm.draw import PARTS, draw
from storm.known import known
from storm.nursery import Nursery
from storm.oracle import Failure, Verdict, judge
from storm.program import Program, from_json
from storm.runner import Runner
from storm.script import script
from storm.shrink import essence, shrink


class Storm:
    """Runs programs and remembers how they failed."""

    def __init__(self, *, cold: bool = False) -> None:
        self._nursery = Nursery()
        self._cold = cold

    def verdict(self, program: Program, plant: str = "") -> Verdict:
        """`plant` is source that every life but the first runs before it begins."""
        try:
            return judge(
                program, Runner(self._nursery, program, cold=self._cold, plant=plant).run()
            )
        except Exception as error:
            said = traceback.format_exc()
            return Verdict([Failure(f"storm: {type(error).__name__}", said)])

    def verdicts(self, programs: Iterable[Program], jobs: int) -> Iterator[tuple[Program, Verdict]]:
        """As they come, a few at a time."""
        left, lock = iter(programs), threading.Lock()
        done: list[tuple[Program, Verdict]] = []
        ready = threading.Condition()

        def work() -> None:
            while True:
                with lock:
                    program = next(left, None)
                result = None if program is None else (program, self.verdict(program))
                with ready:
                    done.append(result)  # type: ignore[arg-type]
                    ready.notify()
                if result is None:
                    return

        with ThreadPoolExecutor(jobs) as pool:
            for _ in range(jobs):
                pool.submit(work)
            try:
                while jobs:
                    with ready:
                        ready.wait_for(lambda: done)
                        result = done.pop(0)
                    if result is None:
                        jobs -= 1
                    else:
                        yield result
            finally:
                with lock:
                    left = iter(())

    def shrunk(self, program: Program, kind: str) -> Program:
        return shrink(program, lambda smaller: self.verdict(smaller).kind == kind)

    def close(self) -> None:
        self._nursery.close()


def main() -> int:
    # a shell that starts it in the background lets it ignore this, and a hunt ends it by this
    signal.signal(signal.SIGINT, signal.default_int_handler)
    given = _arguments()
    if given.mutants is not None:
        from storm.mutants import Drawn, hunt

        drawn = Drawn(given.n, given.seed, given.jobs, ",".join(given.only))
        return hunt(given.mutants, drawn)
    storm = Storm(cold=given.cold)
    try:
        return _run(storm, given)
    finally:
        storm.close()


def _run(storm: Storm, given: argparse.Namespace) -> int:
    began, refused, count = time.monotonic(), 0, 0
    failed: dict[str, list[tuple[Program, Failure]]] = collections.defaultdict(list)
    open_ones: collections.Counter[str] = collections.Counter()
    for program, verdict in storm.verdicts(_programs(given), given.jobs):
        count += 1
        if given.json:
            print(json.dumps({"seed": program.seed, "kind": verdict.kind}), flush=True)
        refused += bool(verdict.refused) and not verdict.failures
        if given.verbose:
            print(f"{program.seed:6} {verdict.kind or verdict.refused[:60] or 'ok'}", flush=True)
        if verdict.failures and (why := known(program, verdict.kind)):
            open_ones[why] += 1
        elif verdict.failures:
            failed[verdict.kind].append((program, verdict.failures[0]))
    if given.json:
        return int(bool(failed))
    seconds, total = time.monotonic() - began, sum(map(len, failed.values()))
    exact = count - total - refused - open_ones.total()
    print(
        f"{count} programs in {seconds:.0f} s ({60 * count / seconds:.0f} a minute): {exact} exact, "
        f"{refused} refused, {open_ones.total()} known, {total} failed in {len(failed)} ways"
    )
    for why, times in open_ones.most_common():
        print(f"{times:5}  known: {why}")
    for kind, cases in sorted(failed.items(), key=lambda item: -len(item[1])):
        seeds = " ".join(str(program.seed) for program, _ in cases[:8])
        print(f"{len(cases):5}  {kind}   [seeds {seeds}]", flush=True)
    for kind, cases in failed.items():
        for number, (program, failure, alike) in enumerate(_causes(storm, kind, cases, given)):
            _show(program, failure, alike, number, given)
    return int(bool(failed))


def _causes(
    storm: Storm, kind: str, cases: list[tuple[Program, Failure]], given: argparse.Namespace
) -> Iterator[tuple[Program, Failure, int]]:
    """A small program for every cause: whatever has all parts of a small one fails for the same reason."""
    left = sorted(cases, key=lambda case: len(str(case[0])))
    if not given.shrink:
        yield (*left[0], len(left))
        return
    for _ in range(given.causes):
        if not left:
            return
        program, failure = left[0]
        small = storm.shrunk(program, kind)
        found = [f for f in storm.verdict(small).failures if f.kind == kind]
        parts = essence(small)
        rest = [case for case in left[1:] if not parts <= essence(case[0])]
        yield small, found[0] if found else failure, len(left) - len(rest)
        left = rest


def _show(
    program: Program, failure: Failure, alike: int, number: int, given: argparse.Namespace
) -> None:
    text = script(program, failure)
    parts = ", ".join(sorted(essence(program)))
    print(f"\n{alike:5}  {failure.kind}: {parts}", flush=True)
    if given.keep:
        name = "".join(c if c.isalnum() else "-" for c in failure.kind)[:70]
        given.keep.mkdir(parents=True, exist_ok=True)
        (given.keep / f"{name}-{number}.py").write_text(text)
    if not given.quiet:
        print(text)


def _programs(given: argparse.Namespace) -> Iterator[Program]:
    if given.program:
        yield from_json(given.program)
        return
    for seed in range(given.seed, given.seed + given.n):
        yield draw(seed, frozenset(given.only))


def _arguments() -> argparse.Namespace:
    names = {name for parts in PARTS.values() for name in parts}
    parser = argparse.ArgumentParser(prog="python -m tests.storm", description=__doc__)
    parser.add_argument("--n", type=int, default=200, help="programs to draw")
    parser.add_argument("--seed", type=int, default=1, help="the first program's")
    parser.add_argument("--jobs", type=int, default=2, help="programs at a time")
    parser.add_argument(
        "--only", default="", help="parts that every program has if they fit, by comma"
    )
    parser.add_argument("--program", help="run this one, given as JSON")
    parser.add_argument("--shrink", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument(
        "--causes", type=int, default=4, help="of a class that are looked for by shrinking"
    )
    parser.add_argument("--keep", type=Path, help="write the scripts of failing programs there")
    parser.add_argument(
        "--cold", action="store_true", help="start shadows as programs, as users' are"
    )
    parser.add_argument("--quiet", action="store_true", help="print no scripts")
    parser.add_argument("--verbose", action="store_true", help="print one line for each program")
    parser.add_argument(
        "--json",
        action="store_true",
        help="print a line for each program: its seed and how it failed; nothing else",
    )
    parser.add_argument(
        "--mutants",
        nargs="*",
        help="how many programs find each planted fault; all if none is named",
    )
    given = parser.parse_args()
    given.only = [name for name in given.only.split(",") if name]
    if unknown := set(given.only) - names:
        parser.error(
            f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(sorted(names))}"
        )
    return given


if __name__ == "__main__":
    sys.exit(main())
