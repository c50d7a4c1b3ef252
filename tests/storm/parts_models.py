"""Models. `model` defines `model` (a module or a dict of them) and may use `x` of shape (4, 6) in `loss`."""

from __future__ import annotations

from storm.program import part

_TIED = """
class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(6, 6), nn.Linear(6, 6)
        self.decode.weight = self.encode.weight
    def forward(self, x):
        return self.decode(self.encode(x).tanh())
"""
_COUNTING = """
class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(6, 3)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("odd", torch.zeros(3, dtype=torch.bool), persistent=False)
    def forward(self, x):
        y = self.net(x)
        self.seen += 1
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        self.odd.logical_not_()
        return y - self.mean
"""
_ODD = """
class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(()))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.turned = nn.Parameter(torch.randn(3, 6).t())
    def forward(self, x):
        return x @ self.turned * self.scale
"""
_BRANCHES = """
class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk, self.branch = nn.Linear(6, 3), nn.Linear(3, 3)
    def forward(self, x, also):
        y = self.trunk(x)
        return self.branch(y) if also else y
"""
_COMPLEX = """
class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(6, 3, dtype=torch.cfloat))
        self.register_buffer("turn", torch.randn(3, dtype=torch.cfloat)$conj)
    def forward(self, x):
        return (x.cfloat() @ self.w * self.turn).abs()
"""

MODELS = [
    part(
        "mlp",
        {"model": "model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))"},
        weight=6,
        gives="module",
    ),
    part("tied", {"defs": _TIED, "model": "model = Tied()"}, gives="module"),
    part(
        "frozen",
        {
            "model": "model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))\n"
            "model[0].requires_grad_(False)"
        },
        gives="module",
    ),
    part(
        "batchnorm",
        {"model": "model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))"},
        gives="module own_loss",
        weight=2,
    ),
    part(
        "dropout",
        {"model": "model = nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.3), nn.Linear(5, 3))"},
        gives="module",
    ),
    part(
        "parametrized",
        {"model": "model = nn.utils.parametrizations.$norm(nn.Linear(6, 3))"},
        gives="module parametrized",
        norm=["weight_norm", "spectral_norm", "orthogonal"],
    ),
    part(
        "lazy",
        {"model": "model = nn.Sequential(nn.LazyLinear(5), nn.Linear(5, 3))\n$first"},
        gives="module lazy",
        first=["", "model(torch.zeros(1, 6))"],
    ),
    part(
        "bfloat16",
        {
            "model": "model = nn.Linear(6, 3).bfloat16()",
            "loss": "model(x.bfloat16()).float().square().mean()",
        },
        gives="module own_loss half",
        weight=0.5,
    ),
    part(
        "double",
        {"model": "model = nn.Linear(6, 3).double()", "loss": "model(x.double()).square().mean()"},
        gives="module own_loss",
        weight=0.5,
    ),
    part(
        "two",
        {
            "model": 'model = {"net": nn.Linear(6, 5), "head": nn.Linear(5, 3)}',
            "params": "params = [p for m in model.values() for p in m.parameters()]",
            "loss": 'model["head"](model["net"](x).relu()).square().mean()',
        },
    ),
    part("buffers", {"defs": _COUNTING, "model": "model = Counting()"}, gives="module buffers"),
    part(
        "branches",
        {
            "defs": _BRANCHES,
            "model": "model = Branches()",
            "loss": "model(x, step % 3 == 0).square().mean()",
        },
        gives="module own_loss absent",
        weight=1.5,
    ),
    part("odd", {"defs": _ODD, "model": "model = Odd()"}, gives="module strange turned"),
    part(
        "conv",
        {
            "model": "model = nn.Conv2d(2, 21, (2, 1)).to(memory_format=torch.channels_last)",
            "loss": "model(x.reshape(4, 2, 3, 1)).square().mean()",
        },
        gives="module own_loss no_matrix turned",
        weight=2,
    ),
    part(
        "complex",
        {"defs": _COMPLEX, "model": "model = Complex()"},
        gives="module complex single",
        weight=0.7,
        conj=["", ".conj()"],
    ),
    part(
        "recurrent",
        {
            "model": "model = nn.GRU(6, 3, batch_first=True)",
            "loss": "model(x[:, None])[0].square().mean()",
        },
        gives="module own_loss",
        weight=0.5,
    ),
    part(
        "flat",  # parameters that are views of one piece of memory
        {
            "model": "model = nn.Linear(6, 3)\n"
            "flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])\n"
            "model.weight.data, model.bias.data = flat[:18].view(3, 6), flat[18:]"
        },
        gives="module flat",
        weight=0.7,
    ),
    part(
        "sparse",
        {
            "model": "model = nn.Embedding(8, 3, sparse=True)",
            "loss": "model((x[:, 0] * 100).long() % 8).square().mean()",
        },
        gives="module own_loss sparse single",
        excused_by="cannot be recorded",
        tells="cannot be recorded",
        weight=1.5,
    ),
]
