"""What happens between two lives. Each returns the path that the next life is given, and may change its
environment; their sources go into printed scripts."""

from __future__ import annotations

import contextlib
import random
import shutil
from pathlib import Path


def flip_bytes(run_dir, env, which):
    """Bytes of some file of the store rot."""
    chance = random.Random(which)
    files = sorted(p for p in Path(run_dir).rglob("*") if p.is_file())
    for path in chance.sample(files, min(which, len(files))):
        with contextlib.suppress(FileNotFoundError):  # a shadow may be removing it just now
            data = bytearray(path.read_bytes())
            if data:
                data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
                path.write_bytes(data)
    return run_dir


def move(run_dir, env, which):
    """The directory gets another name."""
    target = f"{run_dir}-moved"
    Path(run_dir).rename(target)
    return target


def delete(run_dir, env, which):
    """The directory is gone; a shadow may live on."""
    shutil.rmtree(run_dir, ignore_errors=True)
    return run_dir


def reach_through_link(run_dir, env, which):
    """The same directory by another path."""
    link = f"{run_dir}-link"
    Path(link).symlink_to(run_dir)
    return link


def elsewhere(run_dir, env, which):
    """The job starts again on another host, which shares the disk but no process with the first one."""
    env["EVERYSTEP_RUNTIME_DIR"] += "-elsewhere"
    return run_dir
