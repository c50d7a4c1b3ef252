"""Every name in a run's directory.

RUN/everystep.json                                   what run this is
RUN/epochs/000002/manifest.json                      what counts, and which point it continues
RUN/epochs/000002/bases/000000000120/index.json      atoms, versions, files, checksums
                                    /weights.safetensors  /slots.safetensors
                                    /session.bin          /tail.bin
RUN/epochs/000002/log/000001-000000000120.log        records behind that step
RUN/tags/best.json                                   a base that a tag pins
"""

from __future__ import annotations

from pathlib import Path

TEMPORARY_PREFIX = ".everystep-tmp-"
RUN_DOCUMENT = "everystep.json"
MANIFEST = "manifest.json"
INDEX = "index.json"
WEIGHTS = "weights.safetensors"
SLOTS = "slots.safetensors"
SESSION = "session.bin"
TAIL = "tail.bin"
TAGS = "tags"


def epoch_dir(run: Path, epoch: int) -> Path:
    return run / "epochs" / f"{epoch:06d}"


def base_dir(run: Path, epoch: int, step: int) -> Path:
    return epoch_dir(run, epoch) / "bases" / f"{step:012d}"


def base_dirs(run: Path) -> list[Path]:
    """Folders of bases in every epoch, whether they count or not."""
    return [path for path in sorted(run.glob("epochs/*/bases/*")) if path.is_dir()]


def epoch_numbers(run: Path) -> list[int]:
    """Claimed epochs, newest first."""
    folder = run / "epochs"
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    return sorted((int(name) for name in names if name.isdigit()), reverse=True)


def epoch_of(path: str) -> int | None:
    """The epoch that a file lies in, by its path below the run; None: it is not ours."""
    words = path.split("/")
    ours = len(words) > 3 and words[0] == "epochs" and words[1].isdigit()
    return int(words[1]) if ours else None


def log_dir(run: Path, epoch: int) -> Path:
    return epoch_dir(run, epoch) / "log"


def segment_name(number: int, after: int) -> str:
    return f"{number:06d}-{after:012d}.log"


def segment_number(segment: Path) -> int:
    return int(segment.stem.partition("-")[0])


def segment_after(segment: Path) -> int:
    """The step that its first record follows."""
    return int(segment.stem.partition("-")[2])


def segments(run: Path, epoch: int) -> list[Path]:
    """Of one epoch's log, oldest first."""
    return sorted(log_dir(run, epoch).glob("[0-9]*-[0-9]*.log"))


def tag_path(run: Path, name: str) -> Path:
    return run / TAGS / f"{name}.json"
