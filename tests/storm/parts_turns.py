"""One turn of the loop: `LOSS` is the model's loss of `x`; a line `@place` is where edits and faults go,
`@zero start` and `@zero end` where gradients may be cleared."""

from __future__ import annotations

from storm.program import part

_ZERO = ["end", "end", "start", "end set_to_none=False", "start set_to_none=False"]

_PLAIN = """
@zero start
loss = LOSS
loss.backward()
@backward
for o in opts:
    o.step()
@stepped
@zero end
"""
_WITHIN = """
@zero start
for _ in range($micro):
    loss = LOSS / $micro
    loss.backward()
    x = x.roll(1, 0) + 0.1
@backward
for o in opts:
    o.step()
@stepped
@zero end
"""
_OVER = """
if step % $k == 0:
    @zero start
loss = LOSS
loss.backward()
@backward
if step % $k == $k - 1:
    for o in opts:
        o.step()
    @zero end
@stepped
"""
_NO_CALL = """
@zero start
loss = LOSS
loss.backward()
@backward
if step % $k != $k - 1:
    for o in opts:
        o.step()
@stepped
@zero end
"""
_TWO_CALLS = """
for _ in range(2):
    @zero start
    loss = LOSS
    loss.backward()
    @backward
    for o in opts:
        o.step()
    x = x + 0.1
    @zero end
@stepped
"""
_CLOSURE = """
def closure():
    opts[0].zero_grad()
    loss = LOSS
    loss.backward()
    return loss
loss = opts[0].step(closure)
@stepped
"""
_SCALER = """
@zero start
loss = LOSS * (float("inf") if step % 4 == 2 else 1.0)
scaler.scale(loss).backward()
@backward
for o in opts:
    scaler.step(o)
scaler.update()
@stepped
@zero end
"""
_CAUGHT = """
@zero start
try:
    loss = LOSS
    loss.backward()
    @backward
    if step % 4 == 2:
        raise ValueError("a bad batch")
    for o in opts:
        o.step()
except ValueError:
    pass
@stepped
@zero end
"""
_STEP_RAISES = """
@zero start
loss = LOSS
loss.backward()
@backward
group = opts[0].param_groups[-1]
lr = group["lr"]
if step % 4 == 2:
    $how
try:
    opts[0].step()
except (TypeError, RuntimeError, ValueError, ZeroDivisionError):
    pass
group["lr"] = lr
vars(opts[0]).pop("_init_group", None)
@stepped
@zero end
"""
_ALTERNATE = """
@zero start
loss = LOSS
loss.backward()
@backward
opts[step % len(opts)].step()
@stepped
@zero end
"""
_SAM = """
LOSS.backward()
with torch.no_grad():
    moves = [0.05 * p.grad if p.grad is not None else torch.zeros_like(p) for p in params]
    for p, move in zip(params, moves):
        p.add_(move)
for o in opts:
    o.zero_grad()
loss = LOSS
loss.backward()
with torch.no_grad():
    for p, move in zip(params, moves):
        p.sub_(move)
@backward
for o in opts:
    o.step()
@stepped
for o in opts:
    o.zero_grad()
"""

TURNS = [
    part("plain", {"turn": _PLAIN}, weight=5, bars="closure_only", zero=_ZERO),
    part("never_zero", {"turn": _PLAIN}, weight=0.7, bars="closure_only sparse", zero=["never"]),
    part("within", {"turn": _WITHIN}, bars="closure_only", zero=_ZERO, micro=[2, 3]),
    part(
        "over",
        {"turn": _OVER},
        weight=2,
        gives="skips",
        bars="closure_only sparse",
        zero=_ZERO,
        k=[2, 3, 4],
    ),
    part(
        "no_call",
        {"turn": _NO_CALL},
        weight=2,
        gives="skips",
        bars="closure_only",
        zero=_ZERO,
        k=[2, 3, 5],
    ),
    part("two_calls", {"turn": _TWO_CALLS}, bars="closure_only", zero=_ZERO),
    part("closure", {"turn": _CLOSURE}, weight=0.7, needs="one", likes="own"),
    part("lbfgs_closure", {"turn": _CLOSURE}, weight=8, needs="closure_only"),
    part(
        "scaler",
        {
            "turn": _SCALER,
            "state": 'scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3)\n'
            'state["scaler"] = scaler',
        },
        gives="skips scaler",
        bars="closure_only sparse complex half",
        likes="fused",
        zero=_ZERO,
    ),
    part("caught", {"turn": _CAUGHT}, gives="skips", bars="closure_only", zero=_ZERO),
    part(
        "step_raises",
        {"turn": _STEP_RAISES},
        needs="one",
        gives="skips",
        bars="closure_only own lazy",
        zero=_ZERO,
        how=["opts[0]._init_group = lambda *_: 1 / 0", 'group["lr"] = "no number"'],
        weight=1.5,
    ),
    part("alternate", {"turn": _ALTERNATE}, weight=0.6, bars="closure_only one", zero=_ZERO),
    part("sam", {"turn": _SAM}, weight=0.6, bars="closure_only sparse lazy"),
]
