"""The command line: how many stores, from which seed, and what was found."""

from __future__ import annotations

import argparse
import collections
import re
import time

from hostile.stores.attack import Outcome, Templates, attack


def main() -> int:
    given = _arguments()
    templates = Templates()
    began, count = time.monotonic(), 0
    failed: dict[str, list[Outcome]] = collections.defaultdict(list)
    try:
        for outcome in attack(templates, range(given.seed, given.seed + given.n), given.jobs):
            count += 1
            if given.verbose:
                print(outcome.seed, outcome.changes, outcome.problems or "ok", flush=True)
            for problem in outcome.problems[:1]:
                failed[_class_of(problem)].append(outcome)
    finally:
        templates.close()
    seconds = time.monotonic() - began
    harmed = sum(map(len, failed.values()))
    print(f"{count} stores in {seconds:.0f} s: {harmed} did harm in {len(failed)} ways")
    for kind, outcomes in sorted(failed.items(), key=lambda item: -len(item[1])):
        first = min(outcomes, key=lambda outcome: len(outcome.changes))
        seeds = " ".join(str(outcome.seed) for outcome in outcomes[:8])
        print(f"\n{len(outcomes):5}  {kind}   [seeds {seeds}]")
        for words in (*first.changes, *first.problems[:3]):
            print(f"       {words}")
    return int(harmed > 0)


def _class_of(problem: str) -> str:
    text = re.sub(r"\S*/\S+", "PATH", problem.splitlines()[0])
    return re.sub(r"0x[0-9a-f]+|\d+", "N", text)[:150]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.hostile.stores", description=__doc__)
    parser.add_argument("--n", type=int, default=200, help="stores to visit")
    parser.add_argument("--seed", type=int, default=1, help="the first store's")
    parser.add_argument("--jobs", type=int, default=2, help="stores at a time")
    parser.add_argument("--verbose", action="store_true", help="print one line for each store")
    return parser.parse_args()
