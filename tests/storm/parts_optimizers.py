"""Optimizers. `optimizer` defines `opts`, the ones to be stepped in this order, from `params`; `given` is
what attach gets."""

from __future__ import annotations

from storm.program import Part, part

_BARS = "sparse"


def _torch(
    kind: str, flags: list[str], *, weight: float = 0.4, lr: str = "lr=0.05", **tags: str
) -> Part:
    """One of torch's optimizers, over all parameters in one group or in two."""
    bars = f"{_BARS} {tags.pop('bars', '')}"
    return part(
        kind.lower(),
        {"optimizer": f"opts = [optim.{kind}($groups, {lr}$flags)]"},
        weight=weight,
        gives=f"one {tags.pop('gives', '')}",
        bars=bars,
        likes=tags.pop("likes", ""),
        groups=["params", "params", '[{"params": params[:1]}, {"params": params[1:], "lr": 0.01}]'],
        flags=["", *(f", {flag}" for flag in flags)],
    )


_PACE = ["foreach=True", "foreach=False", "maximize=True", "capturable=False"]
_ADAM = ["amsgrad=True", "weight_decay=0.1", "betas=(0.5, 0.9)", *_PACE]

_NESTED = """
class Clipped(optim.$base):
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(0.5)
        return super().step(closure)
"""
_LOOKAHEAD = """
class Lookahead(optim.Optimizer):
    def __init__(self, base):
        self.base = base
        super().__init__([p for g in base.param_groups for p in g["params"]], {"lr": 0.05})
    @torch.no_grad()
    def step(self, closure=None):
        self.base.step()
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            slow = state.setdefault("slow", p.detach().clone())
            state["k"] = state.get("k", 0) + 1
            if state["k"] % 3 == 0:
                p.copy_(slow.lerp_(p, 0.5))
"""
_OWN = """
class Own(optim.Optimizer):
    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})$init
    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        $before
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                s = self.state[p]
                $body
        return loss$more
"""


def _own(
    name: str,
    body: str,
    *,
    before: str = "pass",
    init: str = "",
    more: str = "",
    setup: str = "",
    weight: float = 0.7,
) -> Part:
    """A class of the user's own with unusual state."""
    pieces = {"before": before, "body": body, "init": init, "more": more}
    source = _OWN
    for word, piece in pieces.items():
        lines = source.splitlines()
        source = "\n".join(_put(line, f"${word}", piece) for line in lines)
    return part(
        name,
        {"defs": source, "optimizer": f"opts = [Own(params)]{setup}"},
        weight=weight,
        gives="one own",
        bars="sparse complex",
    )


def _put(line: str, word: str, piece: str) -> str:
    if word not in line:
        return line
    margin = line[: len(line) - len(line.lstrip())] if line.strip() == word else ""
    head, *rest = piece.split("\n")
    return "\n".join([line.replace(word, head), *(margin + more for more in rest)])


OPTIMIZERS = [
    _torch(
        "SGD",
        [
            *("momentum=0.9", "momentum=0.9, nesterov=True", "momentum=0.9, dampening=0.5"),
            *("weight_decay=0.1", "maximize=True", "foreach=True", "foreach=False"),
        ],
        weight=4,
        gives="plain",
    ),
    _torch("Adam", [*_ADAM, "decoupled_weight_decay=True"], weight=1, gives="slots"),
    _torch("AdamW", _ADAM, weight=2, gives="slots", likes="turned"),
    _torch("Adagrad", ["lr_decay=0.1", *_PACE[:3]], gives="slots eager", bars="lazy"),
    _torch("Adadelta", _PACE, lr="lr=0.5", gives="slots"),
    _torch("Adamax", _PACE, gives="slots", bars="complex"),
    _torch("ASGD", _PACE, gives="slots"),
    _torch("NAdam", ["decoupled_weight_decay=True", *_PACE], gives="slots"),
    _torch("RAdam", ["decoupled_weight_decay=True", *_PACE], gives="slots"),
    _torch("RMSprop", ["centered=True", "momentum=0.5", *_PACE], lr="lr=0.01", gives="slots"),
    _torch("Rprop", _PACE, lr="lr=0.01", gives="slots"),
    _torch("Adafactor", ["maximize=True", "foreach=False"], bars="complex strange half"),
    part(
        "fused",
        {"optimizer": "opts = [optim.$kind(params, lr=0.05, fused=True)]"},
        weight=1.2,
        gives="one fused",
        bars="sparse complex lazy",
        likes="turned",
        kind=["SGD", "AdamW", "Adam"],
    ),
    part(
        "fused_adagrad",  # its state is there from the beginning, and must stay
        {"optimizer": "opts = [optim.Adagrad(params, lr=0.05, fused=True)]"},
        weight=0.4,
        gives="slots eager",
        bars="sparse complex lazy",
    ),
    part(
        "muon",
        {
            "optimizer": "opts = [optim.Muon([p for p in params if p.ndim == 2], lr=0.02$flags), "
            "optim.SGD([p for p in params if p.ndim != 2], lr=0.05)]",
            "given": '{"matrices": opts[0], "rest": opts[1]}',
        },
        weight=0.5,
        bars="sparse complex strange lazy parametrized half flat no_matrix",
        needs="module",
        flags=["", ", nesterov=False", ", weight_decay=0.0"],
    ),
    part(
        "lbfgs",
        {"optimizer": "opts = [optim.LBFGS(params, lr=0.1, max_iter=3$flags)]"},
        weight=0.8,
        gives="one closure_only",
        bars="sparse complex half lazy strange no_matrix",
        flags=["", ", history_size=2", ', line_search_fn="strong_wolfe"'],
    ),
    part(
        "sparseadam",
        {"optimizer": "opts = [optim.SparseAdam(params, lr=0.05)]"},
        needs="sparse",
        gives="one slots",
        weight=20,
    ),
    part(
        "several",
        {
            # the last one is small: what is lost of the first optimizer's slots is part of a log
            "optimizer": "opts = [optim.$first(params[-1:], lr=0.05), "
            "optim.$second(params[:-1], lr=0.02)]",
            "given": '{"a": opts[0], "b": opts[1]}',
        },
        weight=4,
        gives="slots small",
        bars="single strange",
        first=["AdamW", "AdamW", "RMSprop", "SGD"],
        second=["SGD", "Adam", "Adafactor"],
    ),
    part(
        "shared",  # two optimizers move the same parameters
        {
            "optimizer": "opts = [optim.SGD(params, lr=0.05, momentum=0.9), optim.AdamW(params, lr=0.01)]",
            "given": '{"a": opts[0], "b": opts[1]}',
        },
        weight=0.6,
        bars="sparse",
    ),
    part(
        "nested",
        {
            "defs": _NESTED,
            "optimizer": "opts = [Clipped(params$part, lr=0.05), optim.$base(params[:1], lr=0.05)]",
            "given": '{"own": opts[0], "plain": opts[1]}',
        },
        weight=2,
        bars="single strange half",
        base=["SGD", "AdamW"],
        part=["[1:]", ""],
    ),
    part(
        "subclass",
        {"defs": _NESTED, "optimizer": "opts = [Clipped(params, lr=0.05)]"},
        weight=0.8,
        gives="one",
        bars="sparse half",
        base=["SGD", "AdamW"],
    ),
    part(
        "lookahead",
        {
            "defs": _LOOKAHEAD,
            "optimizer": "base = optim.$base(params, lr=0.05)\nopts = [Lookahead(base)]",
            "given": '{"ahead": opts[0], "base": base}',
        },
        weight=1.5,
        bars="sparse complex",
        base=["SGD", "AdamW"],
    ),
    _own(
        "global_key",
        'p.sub_(p.grad, alpha=group["lr"] / state["steps"])',
        before='state = self.state["global"]\nstate["steps"] = state.get("steps", 0) + 1',
    ),
    _own(
        "scalar_key",
        'p.sub_(p.grad, alpha=group["lr"] / self.state["k"])',
        before='self.state["k"] += 1',
        init='\n        self.state["k"] = 0',
    ),
    _own(
        "odd_values",
        's["t"] = s.get("t", 0) + 1\n'
        's["decay"] = s.get("decay", 1.0) * 0.9\n'
        's.setdefault("past", []).append(float(p.grad.abs().mean()))\n'
        's["none"], s["word"] = None, ("odd", "even")[s["t"] % 2 == 0]\n'
        's["norms"] = torch.stack([p.grad.norm(), p.norm(), *s.get("norms", [])])[:5]\n'
        'p.sub_(p.grad, alpha=group["lr"] * s["decay"] * sum(s["past"]) / s["t"])',
    ),
    _own(
        "changing_kind",  # a slot is a float at one step, a tensor at the next, and None
        's["m"] = (p.grad.clone(), 0.5, None)[s.get("t", 0) % 3]\n'
        's["t"] = s.get("t", 0) + 1\n'
        'p.sub_(p.grad * (s["m"] if s["m"] is not None else 0.3), alpha=group["lr"])',
    ),
    _own(
        "attribute",
        'p.sub_(p.grad, alpha=group["lr"] / self.t)',
        before="self.t += 1",
        init="\n        self.t = 0",
        more="\n    def state_dict(self):\n        return {**super().state_dict(), 't': self.t}"
        "\n    def load_state_dict(self, stored):\n        self.t = stored.pop('t')"
        "\n        super().load_state_dict(stored)",
    ),
    _own(
        "odd_attributes",  # names that are no identifiers, and one behind a property
        'p.sub_(p.grad, alpha=group["lr"] * getattr(self, "ema-decay") / self.pace)',
        before='self.pace += 1\nvars(self)["ema-decay"] *= 0.9\nself.late = self.pace',
        init='\n        self.pace = 0\n        vars(self)["ema-decay"] = 1.0',
        more="\n    def put(self, pace):\n        vars(self)['pace'] = pace"
        "\n    pace = property(lambda self: vars(self)['pace'], put)",
    ),
    _own(
        "replacing",
        's["m"] = 0.9 * s.get("m", torch.zeros_like(p)) + p.grad\n'
        'p.sub_(s["m"] / (1 + s["m"].norm()), alpha=group["lr"])',
    ),
    _own(
        "noisy",  # a step that is done again draws other numbers
        'p.sub_(p.grad + 0.1 * torch.randn_like(p), alpha=group["lr"])',
    ),
    part(
        "hooked",  # the user's own pre-hook changes gradients
        {
            "optimizer": "opts = [optim.SGD(params, lr=0.05, momentum=0.9)]\n"
            "opts[0].register_step_pre_hook(\n"
            "    lambda *_: [nn.utils.clip_grad_norm_(params, 0.5)] and None)"
        },
        weight=0.8,
        gives="one",
        bars="sparse complex",
    ),
    part(
        "sparsesgd",
        {"optimizer": "opts = [optim.SGD(params, lr=0.05)]"},
        needs="sparse",
        gives="one",
        weight=10,
    ),
]
