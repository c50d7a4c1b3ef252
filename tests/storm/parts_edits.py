"""What a user does to weights and optimizers besides stepping. `placed` goes to `place`: `start`, `backward`
(gradients are there), `stepped` (the optimizers have stepped) or `end` of a turn."""

from __future__ import annotations

from storm.program import Part, part

_AT = [2, 3, 4, 5, 6]
_PLACES = ["stepped", "start", "backward"]


def _once(
    name: str, what: str, *, weight: float = 1.0, places: list[str] | None = None, **tags: str
) -> Part:
    """Done in one turn only."""
    body = "\n".join(f"    {line}" for line in what.strip().splitlines())
    return part(
        name,
        {"placed": f"if step == $at:\n{body}"},
        weight=weight,
        at=_AT,
        place=places or _PLACES,
        **tags,
    )


_FORGETS = {"needs": "slots", "bars": "own eager", "gives": "forgets", "likes": "small"}
_REPLACE = """
old, new = params[0], nn.Parameter(params[0].detach() * 0.5)
for m in model.modules():
    for n, p in list(m._parameters.items()):
        if p is old:
            m._parameters[n] = new
for g in opts[0].param_groups:
    g["params"] = [new if p is old else p for p in g["params"]]
opts[0].state.pop(old, None)
params[0] = new
"""
_EMA_SWAP = """
if step % 3 == 1:
    for a, p in zip(ema["w"], params):
        kept = p.detach().clone()
        p.data.copy_(a)
        a.copy_(kept)
"""

EDITS = [
    _once("clamp", "for p in params:\n    p.data.clamp_(-0.2, 0.2)", bars="complex"),
    part(
        "clamp_always",
        {"placed": "for p in params:\n    p.data.clamp_(-0.2, 0.2)"},
        bars="complex",
        place=_PLACES,
    ),
    _once("flip", "params[0].data.copy_(params[0].data.flip(0))", weight=1.5),
    _once("point", "params[0].data = params[0].data * 0.5"),
    _once("write", "with torch.no_grad():\n    params[-1].add_(0.125)"),
    _once(
        "slot_data",
        "for s in opts[0].state.values():\n"
        "    for v in s.values():\n"
        "        if isinstance(v, torch.Tensor) and v.dim():\n"
        "            v.data.mul_(0.5)",
        weight=3,
        needs="one slots",
        likes="turned",
    ),
    _once(
        "slot_zero",
        "for s in opts[0].state.values():\n"
        "    for v in s.values():\n"
        "        if isinstance(v, torch.Tensor) and v.dim():\n"
        "            v.zero_()",
        needs="one slots",
    ),
    _once("forget", "opts[0].state.clear()", weight=2, places=["stepped", "end"], **_FORGETS),
    part(
        "forget_one",
        {"placed": "if step == $at:\n    opts[0].state.pop(params[$which], None)"},
        weight=5,
        at=_AT,
        place=["stepped", "end", "start"],
        which=[-1, 0],
        **_FORGETS,
    ),
    _once(
        "load_model",
        "model.load_state_dict({k: v * 0.5 if v.is_floating_point() else v "
        "for k, v in model.state_dict().items()})",
        needs="module",
        bars="parametrized lazy",
    ),
    _once(
        "load_optimizer",
        "opts[0].load_state_dict(copy.deepcopy(opts[0].state_dict()))",
        needs="one",
        bars="own",
    ),
    _once(
        "replace",
        _REPLACE,
        weight=1.5,
        needs="module one",
        bars="parametrized own flat closure_only eager",
    ),
    part(
        "retype",
        {
            "loss": "model(x.to(params[0].dtype)).square().mean()",
            "placed": "if step == $at:\n"
            "    for p in model.parameters():\n"
            "        p.data, p.grad = p.data.double(), None",
        },
        weight=0.5,
        needs="module plain",
        gives="retyped",
        bars="parametrized lazy complex strange flat own_loss average",
        at=_AT,
        place=["start"],
    ),
    _once(
        "new_buffer",
        "model.mean = torch.full_like(model.mean, 0.25)",
        needs="buffers",
        weight=3,
    ),
    _once("lr", 'opts[0].param_groups[0]["lr"] = 0.011'),
    _once("group_key", 'opts[0].param_groups[0]["note"] = ("warm", step)', weight=0.7),
    part(
        "ema",
        {
            "state": 'ema = {"w": [p.detach().clone() for p in params]}\nstate["ema"] = ema',
            "end": 'for a, p in zip(ema["w"], params):\n    a.lerp_(p.detach(), 0.25)',
            "placed": _EMA_SWAP,
        },
        gives="average",
        bars="average lazy retyped",
        place=["end", "stepped"],
    ),
    part(
        "swa",
        {
            "params": "swa = optim.swa_utils.AveragedModel(model)",
            "models": '{"net": model, "swa": swa}',
            "end": "if step % 3 == 2:\n    swa.update_parameters(model)",
        },
        needs="module",
        gives="average",
        bars="average lazy parametrized complex retyped",
        weight=0.7,
    ),
    part(
        "later_group",
        {
            "params": "held = params.pop().requires_grad_(False)",
            "start": "held.requires_grad_(step >= $at)",
            "placed": 'if step == $at:\n    opts[0].add_param_group({"params": [held], "lr": 0.03})',
        },
        needs="module one",
        gives="popped",
        bars="strange lazy single closure_only own scheduled popped",
        at=_AT,
        place=["start"],
        weight=1.2,
    ),
    part(
        "left_out",  # of all optimizers, but not of the norm
        {
            "params": "if len(params) > 2:\n    params.pop()",
            "placed": "nn.utils.clip_grad_norm_(model.parameters(), 0.5)",
        },
        needs="module",
        gives="popped",
        bars="strange lazy single closure_only complex sparse popped",
        place=["backward"],
        weight=1.5,
    ),
    part(
        "post_hook",
        {
            "optimizer": "opts[0].register_step_post_hook(\n"
            "    lambda *_: [p.data.mul_(0.99) for p in params] and None)"
        },
        weight=0.6,
    ),
    part(
        "grad_edit",
        {"placed": "for p in params:\n    if p.grad is not None:\n        p.grad.data.$how"},
        bars="sparse complex",
        place=["backward"],
        how=["sign_()", "clamp_(-0.1, 0.1)", "copy_(p.grad * 2)"],
    ),
    part("flush", {"start": "if step == $at:\n    run.flush(60)"}, weight=2, at=_AT),
    part(
        "status",
        {"placed": 'tell("status", run.step, run.status())'},
        weight=2,
        place=["start"],
    ),
    part("report", {"end": "run.report(float(loss.detach()))"}, weight=0.3),
    part("slow", {"end": "time.sleep(0.03)"}, weight=0.5),
]
