"""Whether a directory is still the one that a writer wrote to: it may be moved, deleted or unmounted."""

from __future__ import annotations

from pathlib import Path

from everystep.errors import CorruptData, EverystepError
from everystep.store.runs import identify, read_manifest

PUT_BACK = "put it back where it was (mv, mount); the shadow then goes on writing by itself"


def known_run(run: Path) -> str:
    """The id of the run that a directory holds; empty: none, or none that can be told."""
    try:
        return identify(run)[0] or ""
    except (OSError, EverystepError):
        return ""


def what_is_lost(run: Path, run_id: str, term: int, pid: int) -> str:
    """What the directory lacks of what that writer left there, in words; empty: it is the writer's. Inodes
    prove nothing, they are used again and change with a mount; what was written does."""
    try:
        here = identify(run)[0]
        if here is None:
            return f"run directory {run} is {'empty' if run.is_dir() else 'gone'}"
        if here != run_id:
            return f"run directory {run} holds another run now ({here}, expected {run_id})"
        manifest = read_manifest(run, term) if term else None
    except CorruptData:
        return ""  # damaged, but there: whoever reads it tells
    except (OSError, EverystepError) as error:
        return f"run directory {run} cannot be read: {str(error).partition(chr(10))[0]}"
    if term and (manifest is None or (manifest.run_id, manifest.pid) != (run_id, pid)):
        return f"run directory {run} lacks term {term}, which shadow {pid} wrote there"
    return ""
