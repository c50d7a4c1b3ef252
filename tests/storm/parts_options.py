"""Options of attach, and what is called before it. `option` is a keyword argument; `keep` and `tuning` are
arguments of `Keep` and `Tuning`; `every` is the value of that option."""

from __future__ import annotations

from storm.program import part

OPTIONS = [
    part("on_lag", {"option": "on_lag=$v"}, v=['"wait"', '"drop"'], weight=5),
    part(
        "durable_log",
        {"option": "durable_log=$v", "start": "$begin"},
        v=["1", "1", "3", '"auto"'],
        begin=["", "if life >= 0 and step == 1:\n    run.flush(60)"],  # behind an early base
        weight=6,
        gives="log",
        likes="forgets",
    ),
    part(
        "durable_every",
        {"option": "durable_every=$v"},
        v=["1", "3", '"0.2s"', '"auto"'],
        weight=3,
        gives="cadence",
    ),
    part(
        "every",
        {"every": "$v"},
        v=["2", "3", '"0.1s"'],
        weight=0.8,
        gives="rests",
        bars="log",
    ),
    part("log", {"tuning": "log=False"}, weight=0.8),
    part(
        "compress",
        {"before": "everystep.compress(opts[0], $how)"},
        bars="sparse complex closure_only strange lazy",
        weight=1.2,
        how=['"topk", ratio=0.5', '"int8"', '"randomk", ratio=0.5', '"bf16"'],
    ),
    part(
        "feedback",
        {
            "before": 'everystep.compress(opts[0], "topk", ratio=0.3, feedback=True)',
            "tuning": 'residuals="exact"',
        },
        bars="sparse complex closure_only strange lazy scaler",
        gives="feedback",
        likes="popped",
        weight=0.8,
    ),
    part(
        "other_class",  # a run is never gone on with by another optimizer
        {"before": "if life > 0:\n    opts[0] = optim.Adagrad(params, lr=0.05)"},
        needs="one",
        bars="sparse complex closure_only lazy flat scheduled",
        gives="other_class",
        weight=0.3,
    ),
    part("keep_last", {"keep": "last=$v"}, v=["1", "2"], weight=0.8, gives="prunes"),
    part("keep_every", {"keep": "every=$v"}, v=["2", "5"], weight=0.4),
    part("keep_best", {"keep": 'best="1 lowest"'}, weight=0.4),
    part("keep_hourly", {"keep": "hourly=1, daily=1"}, weight=0.3),
    part("keep_slots", {"keep": "slots=1"}, weight=0.4, bars="rewinds"),
    part("fingerprint_every", {"tuning": "fingerprint_every=$v"}, v=["1", "3"], weight=1.5),
    part("on_failure", {"option": 'on_failure="raise"'}, weight=0.7),
    part("budget", {"option": "overhead_budget_percent=$v"}, v=["100", "0.01"], weight=0.3),
]
