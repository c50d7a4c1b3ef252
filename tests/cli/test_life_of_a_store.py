"""Tags, retention, prune, diff and export as programs read them, on stores that real training made."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import ondisk
import pytest
import torch
from exact.damage import flip
from safetensors.torch import load_file, load_model
from typer.testing import CliRunner

import everystep
from everystep.cli.app import app
from everystep.errors import StepUnavailable
from everystep.recover.diff import widen
from everystep.replay.tensors import raw_bytes
from everystep.store.retention import unreferenced
from everystep.store.runs import newest_manifest, write_manifest


def command(*words: object) -> tuple[int, dict[str, Any]]:
    """Run a command with --json, in this process; stdout must be one document and nothing else."""
    done = CliRunner().invoke(app, [*map(str, words), "--json"], catch_exceptions=False)
    assert done.stdout, done.stderr
    return done.exit_code, json.loads(done.stdout)


class Tied(torch.nn.Module):
    """Tied weights, a buffer that belongs to the state, and one that does not; bfloat16 in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(6, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.middle = torch.nn.Linear(4, 4, bias=False).to(torch.bfloat16)
        self.head = torch.nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scratch", torch.ones(2), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embed(tokens)).to(torch.bfloat16)
        return self.head(self.middle(x).float())


def build(seed: int = 0) -> tuple[Tied, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Tied()
    slow = [p for n, p in model.named_parameters() if n.startswith("norm")]
    fast = [p for n, p in model.named_parameters() if not n.startswith("norm")]
    return model, torch.optim.AdamW([{"params": slow, "lr": 0.01}, {"params": fast}], lr=0.1)


def train(
    path: Path, bases: int, metrics: tuple[float, ...] = (), **options: Any
) -> tuple[Tied, torch.optim.Optimizer]:
    """One base a step, the first before it."""
    model, optimizer = build()
    with everystep.attach(
        model, optimizer, run=path, every=1, on_failure="raise", **options
    ) as run:
        for step in run.steps(bases):
            run.flush()
            model(torch.randint(0, 6, (8,))).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step < len(metrics):
                run.report(metrics[step])
    return model, optimizer


def steps(path: Path) -> list[int]:
    return everystep.open_run(path).steps


def same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]) and value.dtype == other[name].dtype, name


@pytest.fixture(scope="module")
def finished() -> Iterator[tuple[Path, Tied, torch.optim.Optimizer]]:
    """A run of five steps with every base left, to be looked at only."""
    with tempfile.TemporaryDirectory(prefix="es-") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("EVERYSTEP_RUNTIME_DIR", f"{folder}/meet")
        path = Path(folder) / "run"
        yield (path, *train(path, 5, metrics=(0.9, 0.3, 0.5, 0.2), keep=everystep.Keep(last=100)))


def test_training_keeps_what_the_rules_say(tmp_path: Path) -> None:
    metrics = (0.5, 0.1, 0.4, 0.3, 0.6, 0.7, 0.8)
    train(tmp_path / "run", 8, metrics, keep=everystep.Keep(last=2, best="1 lowest", every=6))
    assert steps(tmp_path / "run") == [0, 2, 6, 7, 8]
    code, listed = command("ls", tmp_path / "run")
    assert code == 0
    assert {b["step"]: b["metric"] for b in listed["bases"]} == {
        0: None, 2: 0.1, 6: 0.7, 7: 0.8, 8: 0.8,
    }  # fmt: skip
    assert command("verify", tmp_path / "run")[1]["ok"]


def test_a_metric_survives_a_restart(tmp_path: Path) -> None:
    train(tmp_path / "run", 2, (0.5, 0.25), keep=everystep.Keep(last=9))
    train(tmp_path / "run", 3, keep=everystep.Keep(last=9))
    code, listed = command("ls", tmp_path / "run")
    assert code == 0 and [b["metric"] for b in listed["bases"] if b["step"] == 3] == [0.25]


def test_tags_pin(tmp_path: Path) -> None:
    path = tmp_path / "run"
    model, optimizer = build()
    with everystep.attach(
        model, optimizer, run=path, keep=everystep.Keep(last=1), on_failure="raise"
    ) as run:
        for step in run.steps(6):
            if step == 2:
                assert run.tag("second") == 2
                assert run.tag("second") == 2, "again is nothing new"
            if step == 4:
                with pytest.raises(everystep.EverystepError, match="it is at step 2"):
                    run.tag("second")
                code, answer = command("tag", path, "4", "fourth")  # beside a living shadow
                assert code == 0 and answer["step"] == 4
            model(torch.randint(0, 6, (8,))).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            run.flush()
    assert steps(path) == [2, 4, 6]
    code, listed = command("ls", path)
    assert code == 0 and {b["step"]: b["tags"] for b in listed["bases"]} == {
        2: ["second"], 4: ["fourth"], 6: [],
    }  # fmt: skip
    code, inside = command("inspect", path, "second")
    assert code == 0 and inside["step"] == 2 and inside["tags"] == ["second"]
    code, refusal = command("tag", path, "6", "fourth", "--remove")
    assert code == 2 and "at step 4" in refusal["error"]
    assert command("tag", path, "4", "fourth", "--remove")[0] == 0
    code, pruned = command("prune", path)
    assert code == 0 and pruned["rules"]["keep_last"] == 1, "the rules of the last attach"
    assert steps(path) == [2, 6]


def test_prune_shows_then_does(tmp_path: Path) -> None:
    path = tmp_path / "run"
    train(path, 5, (0.9, 0.3, 0.5, 0.2), keep=everystep.Keep(last=100))
    size = sum(p.stat().st_size for p in path.rglob("*") if p.is_file())
    wanted = ("--keep-last", "1", "--keep-best", "1 lowest")
    code, shown = command("prune", path, "--dry-run", *wanted)
    assert code == 0 and steps(path) == [0, 1, 2, 3, 4, 5] and not shown["done"]
    verdicts = {b["step"]: (b["stays"], b["why"]) for b in shown["bases"]}
    assert verdicts[5] == (True, ["last 1"]) and verdicts[4] == (True, ["best 1 lowest"])
    assert not any(verdicts[step][0] for step in (0, 1, 2, 3))
    code, done = command("prune", path, *wanted)
    assert code == 0 and done["frees_bytes"] == shown["frees_bytes"] > 0 and done["done"]
    assert steps(path) == [4, 5] and command("verify", path)[1]["ok"]
    left = sum(p.stat().st_size for p in path.rglob("*") if p.is_file())
    assert size - shown["frees_bytes"] <= left < size - shown["frees_bytes"] + 8192  # a manifest
    assert command("prune", path, *wanted)[1]["frees_bytes"] == 0
    model, _ = train(path, 7, keep=everystep.Keep(last=100))  # and training goes on behind it
    assert steps(path)[:2] == [4, 5] and steps(path)[-1] == 7
    fresh = build(9)
    assert everystep.restore(path, *fresh) == 7
    same(model.state_dict(), fresh[0].state_dict())


@pytest.mark.parametrize("point", ["manifest_synced", "manifest_renamed", "old_bases_half_removed"])
def test_prune_killed_in_the_middle_is_done_by_the_next(
    tmp_path: Path, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run"
    train(path, 3, keep=everystep.Keep(last=100))
    words = [sys.executable, "-m", "everystep", "prune", str(path), "--keep-last", "1"]
    with monkeypatch.context() as patched:
        patched.setenv("EVERYSTEP_CRASH_AT", point)
        assert subprocess.run(words, check=False).returncode == -signal.SIGKILL
    assert steps(path)[-1] == 3 and command("verify", path)[1]["ok"]
    assert subprocess.run(words, capture_output=True, check=False).returncode == 0
    assert steps(path) == [3]
    assert unreferenced(path, everystep.open_run(path).bases, ondisk.term_numbers(path)[0]) == []
    assert command("verify", path)[1]["ok"] and everystep.restore(path, *build(9)) == 3


def lose_host(path: Path) -> int:
    """With bases of steps 0, 2 and 4 and a log of all; returns the last step of that."""
    options = {"durable_log": 1, "durable_every": "1h", "on_lag": "wait", "on_failure": "raise"}
    script = (
        "import os, sys, time, torch, everystep; sys.path[:0] = sys.argv[2:]\n"
        "from cli.test_life_of_a_store import build\n"
        "model, optimizer = build()\n"
        "given = {'run': sys.argv[1], 'keep': everystep.Keep(last=9)}\n"
        f"run = everystep.attach(model, optimizer, **given, **{options!r})\n"
        "for step in run.steps(20):\n"
        "    if step in (2, 4): run.flush()\n"
        "    if step == 9:\n"
        "        while run.status()['durable_step'] < 8: time.sleep(0.01)\n"
        "        pid = run.status()['pid']; os.kill(pid, 9)\n"
        "        try:\n"  # it takes its time to die, and until then the run is written
        "            while ') Z' not in open(f'/proc/{pid}/stat').read(): time.sleep(0.01)\n"
        "        finally: os._exit(0)\n"
        "    model(torch.randint(0, 6, (8,))).mean().backward(); optimizer.step()\n"
        "    optimizer.zero_grad()\n"
    )
    tests = str(Path(__file__).parents[1])
    subprocess.run([sys.executable, "-c", script, str(path), tests], check=True, timeout=120)
    reached: int = command("verify", path)[1]["log_step"]
    assert reached >= 8
    return reached


def test_prune_leaves_the_log_behind_the_newest_base(tmp_path: Path) -> None:
    path = tmp_path / "run"
    reached = lose_host(path)
    code, done = command("prune", path, "--keep-last", "1")
    assert code == 0 and done["done"] and steps(path) == [4]
    assert command("verify", path)[1]["log_step"] == reached
    assert everystep.restore(path, *build(9)) == reached


def test_a_record_that_newer_bases_hold_is_damaged(tmp_path: Path) -> None:
    """Its step is lost and said to be; what comes behind the next base is not."""
    path = tmp_path / "run"
    reached = lose_host(path)
    flip(path, 3, "gradients")
    report = command("verify", path)[1]
    assert report["ok"] and report["log_step"] == reached
    assert ["step 3 is damaged" in note for note in report["notes"]] == [True]
    assert everystep.restore(path, *build(9)) == reached
    assert everystep.restore(path, *build(9), step=5) == 5
    with pytest.raises(StepUnavailable):
        everystep.restore(path, *build(9), step=3)


def test_prune_does_not_touch_a_run_that_is_written(tmp_path: Path) -> None:
    path = tmp_path / "run"
    model, optimizer = build()
    with everystep.attach(
        model, optimizer, run=path, keep=everystep.Keep(last=9), on_failure="raise"
    ) as run:
        for _ in run.steps(3):
            model(torch.randint(0, 6, (8,))).mean().backward()
            optimizer.step()
            run.flush()
        code, refusal = command("prune", path, "--keep-last", "1")
        assert code == 2 and refusal["kind"] == "RunBusy" and "writes it" in refusal["error"]
        assert command("prune", path, "--keep-last", "1", "--dry-run")[0] == 0
        ahead = run.status()["disk_forecast"]
        assert ahead["base_bytes"] > 0 and ahead["bytes_per_day"] > 0 and not ahead["warning"]
        assert command("status", path)[1]["disk_forecast"]["base_bytes"] > 0
        assert run.status()["health"] == "ok"
    assert steps(path)[-1] == 3 and len(steps(path)) > 1
    newest = newest_manifest(path)
    assert newest is not None
    write_manifest(path, msgspec.structs.replace(newest, host="elsewhere"))
    code, refusal = command("prune", path, "--keep-last", "1")
    assert code == 2 and "elsewhere" in refusal["error"] and "--force" in refusal["hint"]
    assert command("prune", path, "--keep-last", "1", "--force")[0] == 0
    assert steps(path) == [3]


def test_prune_keeps_everything_where_nothing_is_valid(tmp_path: Path) -> None:
    path = tmp_path / "run"
    train(path, 3, keep=everystep.Keep(last=9))
    newest, *older = sorted(path.rglob("weights.safetensors"), reverse=True)
    newest.write_bytes(b"rotten")
    code, shown = command("prune", path, "--keep-last", "1")
    assert code == 0 and shown["verified_step"] == 2
    assert steps(path) == [2, 3], "what is verified, and what is newer"
    for victim in older:
        if victim.exists():
            victim.write_bytes(b"rotten")
    code, shown = command("prune", path, "--keep-last", "1")
    assert code == 1 and steps(path) == [2, 3] and shown["problems"]


def test_diff(finished: tuple[Path, Tied, Any]) -> None:
    path = finished[0]
    code, found = command("diff", path, "2", "latest")
    assert code == 0 and (found["a"], found["b"]) == (2, 5)
    atoms = {a["name"]: a for a in found["atoms"]}
    assert not atoms["scratch"]["changed"] and atoms["scratch"]["max_change"] == 0
    before, after = (build(seed)[0] for seed in (7, 8))
    everystep.restore(path, before, step=2)
    everystep.restore(path, after, step=5)
    for name, old in before.named_parameters():
        new = dict(after.named_parameters())[name].detach().double()
        old = old.detach().double()
        assert atoms[name]["changed"]
        assert atoms[name]["max_change"] == (new - old).abs().max().item()
        relative = ((new - old).norm() / old.norm()).item()
        assert math.isclose(atoms[name]["relative_change"], relative, rel_tol=1e-9)
        assert math.isclose(atoms[name]["norm_after"], new.norm().item(), rel_tol=1e-9)
    code, none = command("diff", path, "3", "3", "--slots")
    assert code == 0 and none["changed"] == 0 and none["total"]["change_norm"] == 0
    assert any(":" in a["name"] for a in none["atoms"])


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float16"])
def test_every_small_float_is_widened(dtype: str) -> None:
    """All codes of a byte, or of two: numpy without torch says what torch says."""
    kind = getattr(torch, dtype)
    size = torch.empty(0, dtype=kind).element_size()
    codes = np.arange(256**size, dtype=f"uint{8 * size}")
    expected = torch.from_numpy(codes.view(f"int{8 * size}")).view(kind).to(torch.float64).numpy()
    with np.errstate(invalid="ignore"):  # some codes are signalling NaNs
        np.testing.assert_array_equal(widen(codes.data.cast("B"), dtype), expected)


def test_export_for_torch(finished: tuple[Path, Tied, Any], tmp_path: Path) -> None:
    path, model, optimizer = finished
    file = tmp_path / "all.pt"
    code, done = command("export", path, "latest", "--to", "torch", "--file", file)
    assert code == 0 and done["step"] == 5 and done["bytes"] == file.stat().st_size
    loaded = torch.load(file, weights_only=True)
    fresh, other = build(9)
    fresh.load_state_dict(loaded["model"])
    other.load_state_dict(loaded["optimizer"])
    same(model.state_dict(), fresh.state_dict())
    assert fresh.head.weight is fresh.embed.weight
    ours, theirs = optimizer.state_dict(), other.state_dict()
    assert ours["param_groups"] == theirs["param_groups"] and ours["state"]
    for number, slots in ours["state"].items():
        same(slots, theirs["state"][number])
    assert list(tmp_path.iterdir()) == [file], "nothing is left beside it"
    code, refusal = command("export", path, "latest", "--to", "torch", "--file", file)
    assert code == 2 and "exists already" in refusal["error"]
    light = tmp_path / "light.pt"
    words = ("export", path, "2", "--to", "torch", "--file", light, "--weights-only")
    assert command(*words)[0] == 0
    assert torch.load(light, weights_only=True).keys() == {"step", "model"}


def test_export_for_safetensors(finished: tuple[Path, Tied, Any], tmp_path: Path) -> None:
    path, model, _ = finished
    file = tmp_path / "weights.safetensors"
    code, _ = command("export", path, "5", "--to", "safetensors", "--file", file)
    assert code == 0
    assert "head.weight" not in load_file(file), "a tied weight is there once"
    fresh = build(9)[0]
    missing, unexpected = load_model(fresh, file)
    assert not unexpected and not set(missing) - {"head.weight"}
    same(model.state_dict(), fresh.state_dict())
    assert raw_bytes(fresh.middle.weight) == raw_bytes(model.middle.weight)


def test_weights_without_slots(tmp_path: Path) -> None:
    path = tmp_path / "run"
    train(path, 4, keep=everystep.Keep(last=3, slots=1))
    assert steps(path) == [2, 3, 4]
    code, listed = command("ls", path)
    assert code == 0 and [b["weights_only"] for b in listed["bases"]] == [False, True, True]
    assert command("verify", path)[1]["ok"]
    with pytest.raises(everystep.EverystepError, match="only its weights"):
        everystep.restore(path, *build(9), step=3)
    code, refusal = command("export", path, "3", "--to", "torch", "--file", tmp_path / "x.pt")
    assert code == 2 and "--weights-only" in refusal["hint"]
    words = ("export", path, "3", "--to", "safetensors", "--file", tmp_path / "x.safetensors")
    assert command(*words)[0] == 0
    weights = everystep.open_run(path).tensors(3)
    found = load_file(tmp_path / "x.safetensors")
    assert found["embed.weight"].numpy().tobytes() == weights["embed.weight"].tobytes()
    assert everystep.restore(path, *build(9)) == 4


@pytest.mark.parametrize(
    "words",
    [
        ("tag", "RUN", "77", "x"),
        ("tag", "RUN", "3", "12"),
        ("tag", "RUN", "3", "absent", "--remove"),
        ("diff", "RUN", "3", "77"),
        ("diff", "RUN", "nobody", "3"),
        ("export", "RUN", "77", "--to", "torch"),
        ("export", "RUN", "nobody", "--to", "safetensors"),
        ("export", "RUN", "3", "--to", "torch", "--file", "/nowhere/at/all.pt"),
        ("prune", "RUN", "--keep-last", "0", "--dry-run"),
        ("prune", "RUN", "--keep-best", "some", "--dry-run"),
        ("prune", "RUN/absent"),
        ("diff", "RUN/absent", "1", "2"),
        ("export", "RUN/absent", "1", "--to", "torch"),
        ("tag", "RUN/absent", "1", "x"),
    ],
)
def test_what_cannot_be_done_is_refused(
    finished: tuple[Path, Tied, Any], words: tuple[str, ...]
) -> None:
    path = finished[0]
    before = sorted(path.rglob("*"))
    code, refusal = command(*(word.replace("RUN", str(path)) for word in words))
    assert code == 2 and (refusal["hint"] or "expected" in refusal["error"]), refusal
    assert sorted(path.rglob("*")) == before


def test_a_broken_base_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "run"
    train(path, 2, keep=everystep.Keep(last=9))
    victim = max(path.rglob("weights.safetensors"))
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1
    victim.write_bytes(data)
    for words in (("diff", path, "1", "2"), ("export", path, "2", "--to", "torch")):
        code, refusal = command(*words)
        assert code == 2 and refusal["kind"] == "CorruptData" and victim.name in refusal["error"]
