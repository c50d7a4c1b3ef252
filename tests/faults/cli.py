"""The command line: how many lives, from which seed, and what was found."""

from __future__ import annotations

import argparse
import collections
import multiprocessing
import re
import time

from faults.crash import INSTANTS, live


def main() -> int:
    given = _arguments()
    began = time.monotonic()
    failed: dict[str, list[str]] = collections.defaultdict(list)
    seeds = range(given.seed, given.seed + given.n)
    with multiprocessing.get_context("spawn").Pool(given.jobs, maxtasksperchild=100) as pool:
        for told in pool.imap_unordered(_told, seeds):
            for problem in told[:1]:
                failed[_class_of(problem)].append(problem)
    seconds, broken = time.monotonic() - began, sum(map(len, failed.values()))
    print(
        f"{given.n} lives, {INSTANTS} crashes each, in {seconds:.0f} s: {broken} broke a promise in "
        f"{len(failed)} ways"
    )
    for kind, problems in sorted(failed.items(), key=lambda item: -len(item[1])):
        print(f"\n{len(problems):5}  {kind}")
        for problem in problems[:4]:
            print(f"       {problem[:600]}")
    return int(broken > 0)


def _told(seed: int) -> list[str]:
    try:
        return list(live(seed))
    except Exception as error:
        return [f"seed {seed}: {type(error).__name__}: {error}"]


def _class_of(problem: str) -> str:
    text = re.sub(r"\S*/\S+", "PATH", problem.partition(": ")[2].splitlines()[0])
    return re.sub(r"0x[0-9a-f]+|\d+", "N", text)[:150]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--n", type=int, default=200, help="lives to live")
    parser.add_argument("--seed", type=int, default=1, help="the first life's")
    parser.add_argument("--jobs", type=int, default=2, help="lives at a time")
    return parser.parse_args()
