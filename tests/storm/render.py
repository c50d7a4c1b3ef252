"""A program as source: definitions and `train(run_dir, life, tell)`; a life below 0 is the reference.

`tell(kind, step, ...)` is how a program says what it sees; runner and printed script each bring their own.
"""

from __future__ import annotations

import re
from string import Template

from storm.draw import PARTS, life_of_faults
from storm.program import Program

IMPORTS = """import collections, contextlib, copy, os, random, signal, subprocess, sys, time
from pathlib import Path
import numpy as np
import torch
from torch import nn, optim
import everystep
"""
_PARAMS = "params = [p for p in model.parameters() if p.requires_grad]"
_HEAD = """
def train(run_dir, life, tell):
    seed = SEED + max(life, 0)  # a resumed run brings everything back, whatever the new objects hold
    torch.manual_seed(seed), np.random.seed(seed), random.seed(seed)
    attach = everystep.attach if life >= 0 else Plain
    @model
    @params
    @optimizer
    state = {}
    @state
    @before
    whole = (MODELS, OPTIMIZERS, state)
    with attach(*whole[:2], run=run_dir, state=state, every=EVERY$options) as run:
        tell("attached", run.step, whole, run)
        @begin
        @loop
        tell("status", run.step, run.status())
    tell("end", TOTAL, whole)
"""
_TURN = """
tell("turn", step)
@data
@start
@body
@end
tell("done", step, whole, loss)
@over
"""


def source(program: Program) -> str:
    """Definitions and `train`; `Plain` has to be there."""
    texts = _texts(program)
    turn = _fill(_TURN, {**texts, "body": texts["turn"]})
    turn = _fill(turn, texts)  # the places inside the body
    loop = _fill("\n".join(texts["loop"]), {"turn": [turn]})
    options = "".join(f", {option}" for option in _options(texts))
    head = _fill(Template(_HEAD).safe_substitute(options=options), {**texts, "loop": [loop]})
    text = f"SEED = {1000 + program.seed}\n" + "\n".join([*texts.get("defs", []), head])
    for word, of in (
        ("MODELS", texts["models"][-1]),
        ("OPTIMIZERS", texts["given"][-1]),
        ("EVERY", texts["every"][-1]),
        ("TOTAL", str(program.steps)),
        ("LOSS", texts["loss"][-1]),
    ):
        text = re.sub(rf"\b{word}\b", lambda _, of=of: of, text)
    return _tidy(text)


def _texts(program: Program) -> dict[str, list[str]]:
    """The source of every part for every place."""
    texts: dict[str, list[str]] = {
        "models": ["model"],
        "given": ["opts[0]"],
        "data": ["x = torch.randn(4, 6)"],
        "every": ["1"],
        "params": [_PARAMS],
        "loss": ["model(x).square().mean()"],
    }
    lives = iter(life_of_faults(program))
    for registry, pick in program.picks():
        values = {**pick.values, "life": next(lives) if registry == "faults" else 0}
        for place, text in PARTS[registry][pick.name].text.items():
            filled = Template(text).safe_substitute(values).strip("\n")
            where = values["place"] if place == "placed" else place
            only = where in ("models", "given", "loss", "data", "every") or (
                where == "params" and registry == "model"
            )
            texts[where] = [filled] if only else [*texts.get(where, []), filled]
        if "zero" in pick.values:
            texts |= _zero(pick.values["zero"])
    return texts


def _options(texts: dict[str, list[str]]) -> list[str]:
    """Keyword arguments of attach."""
    groups = {"keep": "Keep", "tuning": "Tuning"}
    return texts.get("option", []) + [
        f"{keyword}=everystep.{kind}({', '.join(texts[keyword])})"
        for keyword, kind in groups.items()
        if keyword in texts
    ]


def _zero(how: str) -> dict[str, list[str]]:
    where, _, flag = how.partition(" ")
    line = f"for o in opts:\n    o.zero_grad({flag})"
    return {f"zero {place}": [line] for place in ("start", "end") if place == where}


def _fill(text: str, texts: dict[str, list[str]]) -> str:
    """Put the texts of a place where its line is, as far in as the line."""
    lines = []
    for line in text.strip("\n").splitlines():
        margin, word = line[: len(line) - len(line.lstrip())], line.strip()
        if word.startswith("@") and word[1:] in texts:
            for piece in texts[word[1:]]:
                lines += [f"{margin}{inner}" if inner else inner for inner in piece.splitlines()]
        else:
            lines.append(line)
    return "\n".join(lines) + "\n"


def _tidy(text: str) -> str:
    """Without places that nothing went to, and conditions that nothing is left of."""
    lines = [line for line in text.splitlines() if not re.match(r"\s*@(?!torch)", line)]
    kept: list[str] = []
    for number, line in enumerate(lines):
        following = next((x for x in lines[number + 1 :] if x.strip()), "")
        if re.match(r"\s*if .*:$", line) and _margin(following) <= _margin(line):
            continue
        kept.append(line)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(kept)).strip("\n") + "\n"


def _margin(line: str) -> int:
    return len(line) - len(line.lstrip())
