"""What cannot be recorded is refused at attach, by path and with what to do, before anything is started."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import everystep
from everystep.errors import RecoveryError, UsageError

from .traces import adam, leaves_nothing, model, shadows, train_step


def lazy() -> Any:
    return nn.Sequential(nn.Linear(8, 8), nn.LazyLinear(4)), {}, "parameter '1.weight'"


def with_buffer(value: Any) -> Any:
    net = model()
    net.register_buffer("odd", value)
    return net, {}, "buffer 'odd'"


def with_state(state: Any, path: str) -> Any:
    return model(), {"state": state}, path


def with_group(value: Any) -> Any:
    net = model()
    optimizer = adam(net)
    optimizer.param_groups[0]["fn"] = value
    return net, {"optimizer": optimizer}, "optimizer[''].param_groups[0]['fn']"


def with_global(value: Any) -> Any:
    net = model()
    optimizer = adam(net)
    optimizer.state["global"] = {"x": [value]}  # type: ignore[index]
    return net, {"optimizer": optimizer}, "optimizer[''].state['global']['x'][0]"


class Wrapper(torch.optim.Optimizer):
    """InFlightBuffers another optimizer, as a Lookahead does."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure: Any = None) -> None:
        self.inner.step()


def wrapped() -> Any:
    net = model()
    return net, {"optimizer": Wrapper(adam(net))}, "in .inner, which was not given"


def odd_key() -> Any:
    net = model()
    return {3: net}, {"optimizer": adam(net)}, "under the key 3"


def a_name_that_is_no_text() -> Any:
    net = model()
    net.register_buffer("a\ud800", torch.zeros(2))
    return net, {}, r"buffer 'a\ud800'"


def a_key_that_is_no_text() -> Any:
    net = model()
    return {"a\ud800": net}, {"optimizer": adam(net)}, r"under the key 'a\ud800'"


def an_attribute_that_is_no_text() -> Any:
    net = model()
    optimizer = Wrapped(net.parameters(), lr=0.1)
    setattr(optimizer, "a\ud800", 3)
    return net, {"optimizer": optimizer}, r"a\ud800"


class Wrapped(torch.optim.SGD):
    """Not torch's own: its attributes are state."""

    @staticmethod
    def reducer(values: Any) -> Any:
        return values.mean()


def with_attribute(name: Any, value: Any) -> Any:
    net = model()
    optimizer = Wrapped(net.parameters(), lr=0.1)
    vars(optimizer)[name] = value
    return net, {"optimizer": optimizer}, repr(name)


def with_group_key(key: Any) -> Any:
    net = model()
    optimizer = adam(net)
    optimizer.param_groups[0][key] = 0.5
    return net, {"optimizer": optimizer}, f"param_groups[0]: the key {key!r}"


def itself() -> Any:
    loop: list[Any] = []
    loop.append(loop)
    return loop


class Failing:
    """An object of the user's whose methods raise."""

    def __init__(self, *, saving: bool = False, loading: bool = False) -> None:
        self.saving, self.loading = saving, loading

    def state_dict(self) -> Any:
        if self.saving:
            raise OSError("the worker is gone")
        return {"place": 3}

    def load_state_dict(self, state: Any) -> None:
        if self.loading:
            raise KeyError("workers")


CASES: dict[str, Callable[[], Any]] = {
    "lazy": lazy,
    "meta": lambda: with_buffer(torch.zeros(2, device="meta")),
    "sparse": lambda: with_buffer(torch.eye(2).to_sparse()),
    "conjugate": lambda: with_buffer(torch.zeros(2, dtype=torch.complex64).conj()),
    "callable": lambda: with_group(len),
    "global": lambda: with_global(open),
    "wrapped": wrapped,
    "odd key": odd_key,
    "no text as name": a_name_that_is_no_text,
    "no text as key": a_key_that_is_no_text,
    "no text as state": lambda: with_state({"a\ud800": {}}, r"a\ud800"),
    "no text as attribute": an_attribute_that_is_no_text,
    "attribute over a method": lambda: with_attribute("reducer", "mean"),
    "number as attribute": lambda: with_attribute(5, 0.5),
    "number in a group": lambda: with_group_key(5),
    "loop": lambda: with_state({"s": {"a": itself()}}, "state['s']['a'][0][0]"),
    "no mapping": lambda: with_state([1], "state is a list"),
    "number as name": lambda: with_state({1: {}}, "under the key 1"),
    "raises": lambda: with_state({"loader": Failing(saving=True)}, "state['loader']"),
}


@pytest.mark.parametrize("case", CASES)
def test_refused_before_anything_is_started(case: str, runtime: Path, tmp_path: Path) -> None:
    net, given, path = CASES[case]()
    optimizer = given.pop("optimizer", None) or torch.optim.SGD(net.parameters(), lr=0.1)
    with leaves_nothing(runtime, tmp_path / "run"), pytest.raises(UsageError) as caught:
        everystep.attach(net, optimizer, run=tmp_path / "run", **given)
    assert path in str(caught.value) and caught.value.hint, str(caught.value)
    assert not shadows(runtime)


def test_a_run_whose_path_is_no_text(tmp_path: Path) -> None:
    """Its name is any bytes for the kernel: it is recorded, or refused in words."""
    run, net = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"), model()
    try:
        everystep.attach(net, adam(net), run=run).close()
    except UsageError as refusal:
        assert r"caf\udce9" in str(refusal) and refusal.hint


def test_a_state_dict_that_raises_is_named_and_its_error_kept(tmp_path: Path) -> None:
    net = model()
    with pytest.raises(UsageError, match=r"state\['loader'\].*worker is gone") as caught:
        everystep.attach(
            net, adam(net), run=tmp_path / "run", state={"loader": Failing(saving=True)}
        )
    assert isinstance(caught.value.__cause__, OSError)


def test_a_load_state_dict_that_raises_is_named_and_its_error_kept(
    runtime: Path, tmp_path: Path
) -> None:
    net = model()
    optimizer = adam(net)
    with everystep.attach(net, optimizer, run=tmp_path / "run", state={"loader": Failing()}) as run:
        for _ in run.steps(2):
            train_step(net, optimizer)
    with pytest.raises(RecoveryError, match=r"state\['loader'\].*KeyError: 'workers'") as caught:
        everystep.attach(
            net, adam(net), run=tmp_path / "run", state={"loader": Failing(loading=True)}
        )
    assert isinstance(caught.value.__cause__, KeyError) and "build it" in (caught.value.hint or "")
    assert not shadows(runtime)
    with everystep.attach(net, adam(net), run=tmp_path / "run", state={"loader": Failing()}) as run:
        assert run.step == 2, "the refused attach has harmed the run"


def test_what_cannot_be_stored_later_on_stops_recording_and_not_training(
    runtime: Path, tmp_path: Path
) -> None:
    net = model()
    optimizer = adam(net)
    run = everystep.attach(net, optimizer, run=tmp_path / "run")
    for step in run.steps(4):
        train_step(net, optimizer)
        if step == 1:
            optimizer.state["global"] = {"x": len}  # type: ignore[index]
    assert "optimizer[''].state['global']['x']" in run.status()["problem"]
    with pytest.warns(UserWarning, match="global"):
        run.close()
