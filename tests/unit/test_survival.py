"""What ends with the trainer, what the OOM killer does, what a cgroup leaves: read, then decided."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_decisions import facts

from everystep.core.survival import Survival, after_oom_score, spared, survival
from everystep.lane.cgroup import read_memory
from everystep.process.oom_score import lower_oom_score_adj

POD = "0::/kubepods/burstable/pod7/main\n"
GIB = 1 << 30


def files(root: Path, **contents: dict[str, str]) -> None:
    for folder, named in contents.items():
        place = root / folder.replace("__", "/").rstrip("/")
        place.mkdir(parents=True, exist_ok=True)
        for name, text in named.items():
            (place / name.replace("_", ".", 1)).write_text(text)


def limits(limit: str, used: int, inactive: int = 0, **more: str) -> dict[str, str]:
    stat = f"anon 5\ninactive_file {inactive}\nactive_file 3\n"
    return {"memory_max": limit, "memory_current": str(used), "memory_stat": stat, **more}


@pytest.mark.parametrize("grouped", ["main", "pod7", "burstable", "none"])
def test_oom_group_is_read_of_parents_too(tmp_path: Path, grouped: str) -> None:
    parts = ["kubepods", "burstable", "pod7", "main"]
    for depth, name in enumerate(parts, 1):
        place = "__".join(parts[:depth])
        files(tmp_path, **{place: {"memory_oom.group": "1\n" if name == grouped else "0\n"}})
    found = read_memory(tmp_path, POD).oom_group
    assert found.endswith(grouped) if grouped != "none" else found == ""
    verdict = survival(facts(oom_group=found))
    assert verdict.outlives, "it survives whatever else happens to the trainer"
    assert verdict.outlives_oom is (grouped == "none")
    assert ("memory.oom.group" in verdict.because) is (grouped != "none")


def test_what_ends_with_the_trainer_survives_no_oom_either() -> None:
    assert not survival(facts(pid=1)).outlives_oom


def test_every_limit_on_the_way_up_counts_and_old_files_do_not(tmp_path: Path) -> None:
    files(
        tmp_path,
        kubepods__burstable__pod7__main=limits("max", 3 * GIB, 2 * GIB),
        kubepods__burstable__pod7=limits(str(8 * GIB), 6 * GIB, 2 * GIB),
        kubepods__burstable=limits(str(32 * GIB), 31 * GIB),
    )
    found = read_memory(tmp_path, POD)
    assert (found.limit_bytes, found.left_bytes) == (8 * GIB, 1 * GIB)
    files(tmp_path, kubepods__burstable__pod7__main={"memory_events": "oom 4\noom_kill 2\n"})
    assert read_memory(tmp_path, POD).oom_kills == 2


def test_the_first_version_of_cgroups(tmp_path: Path) -> None:
    files(
        tmp_path,
        memory__job={
            "memory_limit_in_bytes": str(4 * GIB),
            "memory_usage_in_bytes": str(3 * GIB),
            "memory_stat": f"cache 1\ntotal_inactive_file {GIB}\n",
            "memory_oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n",
        },
        memory={"memory_limit_in_bytes": "9223372036854771712"},
    )
    found = read_memory(tmp_path, "4:cpu,memory:/job\n0::/\n")
    assert found == (4 * GIB, 2 * GIB, "", 1)


def test_no_cgroup_at_all(tmp_path: Path) -> None:
    found = read_memory(tmp_path, "")
    assert found.limit_bytes == 0 and found.left_bytes > 1 << 50 and found.oom_group == ""


class ScoreFile:
    """/proc/self/oom_score_adj of a process that may not go below `least`."""

    def __init__(self, value: int, least: int) -> None:
        self.value, self.least = value, least

    def read_text(self) -> str:
        return f"{self.value}\n"

    def write_text(self, text: str) -> None:
        if int(text) < self.least:
            raise PermissionError(13, "Permission denied")
        self.value = int(text)


@pytest.mark.parametrize(
    "least, reached", [(-1000, -300), (-300, -300), (-299, -299), (-7, -7), (0, 0)]
)
def test_the_score_goes_down_as_far_as_it_may(least: int, reached: int) -> None:
    file = ScoreFile(0, least)
    assert lower_oom_score_adj(-300, file) == reached  # type: ignore[arg-type]
    assert file.value == reached
    verdict = after_oom_score(Survival(True, "outlives"), -300, reached)
    assert verdict.outlives and verdict.outlives_oom is (reached == -300)
    if not verdict.outlives_oom:
        assert "oom_score_adj" in verdict.because and "choom -n" in verdict.because


def test_what_holds_the_state_does_not_count_against_the_shadow() -> None:
    given = facts(memory_limit_bytes=64 * GIB, memory_total_bytes=1024 * GIB)
    assert spared(given, 32 * GIB, 0) == -500
    assert spared(given, 32 * GIB, 900) == 400
    assert spared(given, 63 * GIB, -500) == -999, "never unkillable"
    assert spared(given, GIB, -1000) == -1000, "what an operator set is not undone"
    assert spared(facts(memory_total_bytes=64 * GIB), 32 * GIB, 0) == -500
    assert spared(facts(), GIB, 0) == 0, "nothing known"
