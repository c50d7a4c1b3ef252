"""Wrong arguments and wrong directories: a clear error, and everything stays as it was."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import everystep
from everystep.errors import (
    ModelMismatch,
    NotARun,
    NothingToRecover,
    OptionsError,
    StoreError,
    UnknownVersion,
    UnsupportedState,
    UsageError,
)
from everystep.format.document import VERSION, _digest

from .traces import adam, leaves_nothing, model, train_step


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of five steps that ended well."""
    run = tmp_path_factory.mktemp("finished") / "run"
    net = model()
    optimizer = adam(net)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EVERYSTEP_RUNTIME_DIR", str(tmp_path_factory.mktemp("rt")))
        with everystep.attach(net, optimizer, run=run) as live:
            for _ in live.steps(5):
                train_step(net, optimizer)
    return run


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def test_directory_that_is_not_ours(runtime: Path, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home/notes.txt").write_text("mine")
    net = model()
    with (
        leaves_nothing(runtime, tmp_path, net),
        pytest.raises(NotARun, match=r"home.*other files") as caught,
    ):
        everystep.attach(net, adam(net), run=tmp_path / "home")
    assert "empty directory" in (caught.value.hint or "")


def test_file_instead_of_directory(runtime: Path, tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    net = model()
    with leaves_nothing(runtime, tmp_path, net), pytest.raises(NotARun, match="it is a file"):
        everystep.attach(net, adam(net), run=tmp_path / "run")
    with leaves_nothing(runtime, tmp_path), pytest.raises(NotARun):
        everystep.open_run(tmp_path / "run")


def test_other_shapes_and_dtypes(runtime: Path, run: Path) -> None:
    net = model(width=16).double()
    with leaves_nothing(runtime, run, net), pytest.raises(ModelMismatch) as caught:
        everystep.attach(net, adam(net), run=run)
    text = str(caught.value)
    assert "0.weight: model has float64[8, 16], run has float32[8, 8]" in text
    assert "2.bias: model has float64[16], run has float32[8]" in text and "step 5" in text
    assert "another run=" in text


def test_other_names_are_listed_up_to_ten(runtime: Path, run: Path) -> None:
    net = nn.ModuleDict({f"layer{i}": nn.Linear(2, 2) for i in range(9)})
    with leaves_nothing(runtime, run, net), pytest.raises(ModelMismatch) as caught:
        everystep.attach(net, adam(net), run=run)
    listed = [line for line in str(caught.value).splitlines() if line.startswith("  ")]
    assert len([line for line in listed if "model, not" in line or "run, not" in line]) == 10
    assert listed[-1].strip() == "and 12 more"  # 18 of the model, 4 of the run
    with leaves_nothing(runtime, run, net), pytest.raises(ModelMismatch):
        everystep.restore(run, net)


def test_other_optimizers_leave_the_model_alone(runtime: Path, run: Path) -> None:
    net = model()
    halves = [{"params": [p]} for p in net.parameters()]
    for optimizer in ({"other": adam(net)}, torch.optim.Adam(halves)):
        with leaves_nothing(runtime, run, net), pytest.raises(ModelMismatch):
            everystep.attach(net, optimizer, run=run)


def test_other_state_names_leave_the_model_alone(runtime: Path, run: Path) -> None:
    net = model()
    with leaves_nothing(runtime, run, net), pytest.raises(ModelMismatch, match="extra"):
        everystep.attach(net, adam(net), run=run, state={"extra": {"a": 1}})


@pytest.mark.parametrize("version", [VERSION - 1, VERSION + 1])
def test_another_format(version: int, runtime: Path, run: Path) -> None:
    path = run / "everystep.json"
    body = path.read_bytes().partition(b"\n")[2]
    head = f"run {version} {len(body)}"
    path.write_bytes(f"everystep {head} {_digest(head, body)}\n".encode() + body)
    net = model()
    with (
        leaves_nothing(runtime, run, net),
        pytest.raises(UnknownVersion, match=f"version {version}") as refusal,
    ):
        everystep.attach(net, adam(net), run=run)
    assert refusal.value.hint


@pytest.mark.parametrize("what", ["manifest.json", "base.json", "index.json", "all"])
def test_a_run_of_which_nothing_is_whole_does_not_begin_anew(
    runtime: Path, run: Path, what: str
) -> None:
    """Its steps may still be saved from a copy: only the user can give them up."""
    broken = [p for p in run.rglob("*.json") if p.name in what or "all" in what]
    assert broken
    for path in broken:
        path.write_bytes(path.read_bytes()[:-1] + b"!")
    net = model()
    with (
        leaves_nothing(runtime, run, net),
        pytest.raises((StoreError, NothingToRecover)) as caught,
    ):
        everystep.attach(net, adam(net), run=run)
    assert re.search("damaged|checksum", str(caught.value)) and caught.value.hint


class Thing:
    pass


class Stateful:
    def __init__(self, state: Any) -> None:
        self._state = state

    def state_dict(self) -> Any:
        return self._state

    def load_state_dict(self, state: Any) -> None:
        self._state = state


@pytest.mark.parametrize(
    ("state", "error", "words"),
    [
        ({"x": {"deep": [1, (2, Thing())]}}, UnsupportedState, ["x", "deep", "1", "Thing"]),
        ({"loader": Stateful({"fn": print})}, UnsupportedState, ["loader", "fn"]),
        ({"plain": Thing()}, UsageError, ["plain", "Thing", "state_dict"]),
    ],
)
def test_unsupported_state_is_named_by_path(
    runtime: Path, tmp_path: Path, state: Any, error: type[Exception], words: list[str]
) -> None:
    net = model()
    with leaves_nothing(runtime, tmp_path / "run", net), pytest.raises(error) as caught:
        everystep.attach(net, adam(net), run=tmp_path / "run", state=state)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_iterator_made_before_attach(runtime: Path, tmp_path: Path) -> None:
    loader = Stateful({"place": 3})
    loader._iterator = iter(())  # type: ignore[attr-defined]
    net = model()
    with (
        leaves_nothing(runtime, tmp_path / "run", net),
        pytest.raises(UsageError, match=r"loader.*iterator") as caught,
    ):
        everystep.attach(net, adam(net), run=tmp_path / "run", state={"loader": loader})
    assert "after attach" in (caught.value.hint or "")


def test_optimizers_that_cannot_be(runtime: Path, tmp_path: Path) -> None:
    net, stranger = model(), nn.Linear(3, 5)
    foreign = torch.optim.SGD([*net.parameters(), *stranger.parameters()], lr=0.1)
    cases = [
        (torch.optim.SGD([{"params": []}], lr=0.1), "no parameters"),
        (foreign, r"shape \[5, 3\] belongs to no given model"),
        ("adam", "str"),
    ]
    for optimizer, words in cases:
        with (
            leaves_nothing(runtime, tmp_path / "run", net),
            pytest.raises(UsageError, match=words),
        ):
            everystep.attach(net, optimizer, run=tmp_path / "run")  # type: ignore[arg-type]
    assert not foreign._optimizer_step_pre_hooks, "a refused attach left its hooks"


@pytest.mark.parametrize(
    "options",
    [{"evry": 1}, {"durable_every": "ten"}, {"durable_every": 0}, {"on_lag": "panic"},
     {"keep": 3}, {"tuning": {"idle_exit": "1s"}}, {"keep_last": 3}],
)  # fmt: skip
def test_options_that_cannot_be(runtime: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    net = model()
    (name,) = options
    # attach has no such keyword
    refusal = TypeError if name in ("evry", "keep_last") else OptionsError
    with leaves_nothing(runtime, tmp_path / "run", net), pytest.raises(refusal, match=name):
        everystep.attach(net, adam(net), run=tmp_path / "run", **options)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (everystep.Keep, {"last": 0}),
        (everystep.Keep, {"best": "3"}),
        (everystep.Keep, {"keep_last": 3}),
        (everystep.Tuning, {"idle_exit": "-1s"}),
        (everystep.Tuning, {"idle_exit": "0s"}),
        (everystep.Tuning, {"log": 1}),
    ],
)
def test_groups_of_options_that_cannot_be(kind: Any, options: dict[str, Any]) -> None:
    """Refused where they are written, by path."""
    (name,) = options
    unknown = name == "keep_last"
    path = name if unknown else f"option {kind.__name__.lower()}.{name}: "
    with pytest.raises(TypeError if unknown else OptionsError, match=path):
        kind(**options)
