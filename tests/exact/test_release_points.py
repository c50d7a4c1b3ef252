"""Where gradients' memory is given back: behind the whole forward too, however a model was compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from everystep.capture.copying.release_points import points_outside, release_points


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.seen: list[str] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def eager(net: Net) -> tuple[nn.Module, nn.Module]:
    return net, net


def wrapped(net: Net) -> tuple[nn.Module, nn.Module]:
    """The compiled wrapper is given, and called."""
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    return compiled, compiled


def inside(net: Net) -> tuple[nn.Module, nn.Module]:
    """The module inside is given, the wrapper is called."""
    return net, torch.compile(net, backend="aot_eager", fullgraph=True)


def in_place(net: Net) -> tuple[nn.Module, nn.Module]:
    net.compile(backend="aot_eager", fullgraph=True)
    return net, net


@pytest.mark.parametrize("how", [eager, wrapped, inside, in_place])
def test_a_point_lies_between_forward_and_backward(
    how: Callable[[Net], tuple[nn.Module, nn.Module]],
) -> None:
    torch._dynamo.reset()
    net = Net()
    given, called = how(net)
    seen: list[str] = []
    handles = release_points([given], lambda: seen.append("point"))
    if how is inside:  # none of these runs: it takes a look around
        handles += points_outside([given], lambda: seen.append("point"))
    net.layers[-1].weight.register_hook(lambda _: seen.append("backward"))
    for _ in range(3):
        seen.clear()
        loss: Any = called(torch.randn(2, 4)).square().mean()
        seen.append("forward done")
        loss.backward()
        before = seen[: seen.index("forward done")]
        assert before and before[-1] == "point", seen  # the last of them behind the forward
        assert seen[-1] == "backward"
    for handle in handles:
        handle.remove()
    seen.clear()
    called(torch.randn(2, 4))
    assert seen == []


def test_the_last_point_comes_behind_the_last_layer() -> None:
    net, order = Net(), []
    release_points([net], lambda: order.append("point"))
    net.layers[-1].register_forward_hook(lambda *_: order.append("last layer"))
    net(torch.randn(2, 4))
    assert order == ["point", "point", "point", "last layer", "point"]
