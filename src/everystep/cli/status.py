"""What a run holds right now: asked of its living shadow, or read from the store."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from everystep.core.cadence import age_seconds
from everystep.core.status import summary
from everystep.errors import EverystepError, NotARun, StoreError
from everystep.lane.control import AskStatus, ask
from everystep.lane.runtime import runtime_dir
from everystep.recover.meet import shadow_of
from everystep.store.bases import read_index
from everystep.store.runs import identify, read_lineage


def run_status(run: Path, bucket: str | None = None) -> dict[str, Any]:
    """The document behind `everystep status`; the same as `run.status()` without the trainer's part."""
    card = shadow_of(run, runtime_dir(str(run)))
    document: dict[str, Any] = {"run": str(run)}
    if card is None:
        document |= _from_store(run)
        if bucket is not None:  # these are its documents
            there = {"url": bucket, "step": document["durable_step"]}
            document |= {"run": bucket, "bucket": there}
    else:
        try:
            document |= ask(card.control, AskStatus(), timeout_seconds=5).status
            if (
                card.run and Path(card.run) != run.resolve()
            ):  # it was moved: the shadow cannot see it
                document |= {k: v for k, v in _from_store(run).items() if k.startswith("durable")}
        except EverystepError as error:
            silent = f"shadow {card.pid} lives but does not answer: {error}"
            document |= {
                **_from_store(run),
                "pid": card.pid,
                "health": "degraded",
                "problem": silent,
            }
    return {"summary": summary(document), **document}


def _from_store(run: Path) -> dict[str, Any]:
    if identify(run)[0] is None:
        raise NotARun(f"status of {run}: there is no run", hint="check the path")
    lineage = read_lineage(run)
    newest = lineage.candidates[0] if lineage.candidates else None
    problems = list(lineage.problems)
    exactness = None
    try:
        exactness = read_index(run, newest).census.exactness if newest else None
    except StoreError as error:
        problems.append(str(error))
    return {
        "pid": None,
        "trainer_pid": None,
        "shadow_step": None,
        "durable_step": newest.entry.step if newest else None,
        "durable_age_seconds": age_seconds(newest.entry.time, time.time()) if newest else None,
        "epoch": newest.epoch if newest else None,
        "exactness": exactness,
        "health": "degraded" if problems else "ok",
        "problem": "; ".join(problems),
    }
