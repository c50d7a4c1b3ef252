"""What a user keeps beside the model: `state` makes it and puts it into `state`, `end` changes it."""

from __future__ import annotations

from storm.program import Part, part


def _plain(name: str, make: str, change: str, weight: float = 1.0, **params: list[str]) -> Part:
    """A dict of the user's own under the part's name."""
    text = {"state": f'{name} = {make}\nstate["{name}"] = {name}', "end": change}
    return part(name, text, weight=weight, **params)


_LOADER = """
class Loader:
    def __init__(self):
        self.at = 0
    def state_dict(self):
        return {"at": self.at}
    def load_state_dict(self, stored):
        self.at = stored["at"]
    def next(self):
        self.at += 1
        return torch.linspace(-1, 1, 24).view(4, 6) * self.at % 1.5
"""

STATES = [
    part(
        "scheduler",
        {
            "state": "sched = optim.lr_scheduler.$kind\nstate['sched'] = sched",
            "end": "sched.step($arg)",
        },
        weight=3,
        gives="scheduled",
        bars="closure_only scheduled popped",
        kind=[
            "StepLR(opts[0], 3, 0.5)",
            "CosineAnnealingLR(opts[0], 7)",
            "ExponentialLR(opts[0], 0.9)",
            "LambdaLR(opts[0], lambda n: 1 / (1 + n))",
            "CyclicLR(opts[0], 0.01, 0.1, 2, cycle_momentum=False)",
            "SequentialLR(opts[0], [optim.lr_scheduler.ConstantLR(opts[0]), "
            "optim.lr_scheduler.ExponentialLR(opts[0], 0.9)], [3])",
        ],
        arg=[""],
    ),
    part(
        "plateau",
        {
            "state": "sched = optim.lr_scheduler.ReduceLROnPlateau(opts[0], patience=1)\n"
            "state['sched'] = sched",
            "end": "sched.step(float(loss.detach()))",
        },
        weight=0.7,
        gives="scheduled",
        bars="closure_only scheduled popped",
    ),
    _plain(
        "arrays",
        '{"f": np.zeros(3, "f2"), "i": np.arange(4).reshape(2, 2), '
        '"s": np.float32(1), "d": np.datetime64("2020")}',
        'arrays["f"] = arrays["f"] + 1\narrays["i"] = arrays["i"].T * 3\narrays["s"] *= np.float32(1.5)',
    ),
    _plain(
        "structured",
        '{"log": np.zeros(2, [("step", "i4"), ("loss", "f8")])}',
        'structured["log"]["step"] += 1\nstructured["log"]["loss"][step % 2] = step / 3',
        1.5,
    ),
    _plain(
        "counter",
        '{"n": collections.Counter(), "last": collections.deque(maxlen=3), "by": collections.OrderedDict()}',
        'counter["n"][f"k{step % 3}"] += 1\ncounter["last"].append(step)\n'
        'counter["by"][step % 4] = (step, "x")',
    ),
    _plain(
        "keys",
        '{(1, "a"): 0, 2: None, None: b"", True: 1}',
        'keys[1, "a"] += 1\nkeys[step, (step, -step)] = complex(step, 0.5)',
    ),
    _plain(
        "numbers",
        '{"big": 2**70, "small": -(2**63), "nan": float("nan"), "zero": -0.0}',
        'numbers["big"] = numbers["big"] * 3 + step\nnumbers["small"] += 1\n'
        'numbers["range"], numbers["set"] = range(step, 9, 2), {step, "x"}',
    ),
    _plain(
        "growing",
        '{"seen": []}',
        'growing["seen"].append(bytes([step % 256]) * $size)',
        1.2,
        size=[3000, 20000],
    ),
    _plain(
        "tensors",
        '{"t": torch.zeros(3), "b": torch.zeros(2, dtype=torch.bfloat16), "n": [torch.ones(())]}',
        'tensors["t"] += step\ntensors["b"] = tensors["b"] + 1\n'
        'tensors["n"].append(torch.full((), float(step)))',
    ),
    part(
        "loader",
        {
            "defs": _LOADER,
            "state": 'loader = Loader()\nstate["loader"] = loader',
            "data": "x = loader.next()",
        },
        gives="data",
        bars="data",
    ),
    part(
        "stateful",
        {
            "state": "from torchdata.stateful_dataloader import StatefulDataLoader\n"
            "rows = torch.linspace(-1, 1, 72).view(12, 6)\n"
            "loader = StatefulDataLoader(rows, batch_size=4, shuffle=$shuffle)\n"
            'state["loader"] = loader',
            "begin": "batches = iter(loader)",
            "data": "x = next(batches, None)\n"
            "if x is None:\n    batches = iter(loader)\n    x = next(batches)",
        },
        weight=0.5,
        gives="data",
        bars="data goes_back",
        shuffle=["False", "True"],
    ),
    part(
        "generator",
        {
            "state": "noise = torch.Generator().manual_seed(3)\n"
            'state["noise"] = drawn = {"g": noise.get_state()}\nnoise.set_state(drawn["g"])',
            "begin": 'noise.set_state(drawn["g"])',
            "data": "x = torch.randn(4, 6, generator=noise)",
            "end": 'drawn["g"] = noise.get_state()',
        },
        gives="data",
        bars="data goes_back",
    ),
    part(
        "draws",  # python's and numpy's own random numbers
        {"data": "x = torch.full((4, 6), random.random()) * float(np.random.normal())"},
        gives="data",
        bars="data",
    ),
]
