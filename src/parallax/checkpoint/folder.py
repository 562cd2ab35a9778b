"""The folder in which the checkpoints of one training lie, one below the other.

    DIR/step-00000120/    each as session.save() makes it
    DIR/step-00000240/

[Note: one line] Steps only go forward, so the newest checkpoint is the one of the highest step. A
script that goes back by `session.load()` leaves later steps behind: the next save removes them,
and a training that does not go on from the checkpoints that are there does not save among them.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from parallax.checkpoint.manifest import Manifest, has_manifest, made_by_save
from parallax.errors import CheckpointError

_NAME = re.compile(r"step-(\d{8,})")


class Folder:
    def __init__(self, path: Path) -> None:
        self.path = path

    def place_of(self, step: int) -> Path:
        return self.path / f"step-{step:08d}"

    def steps(self) -> dict[int, Path]:
        """Folders with the name of a checkpoint, complete or not, in the order of their steps."""
        found = {}
        if self.path.is_dir():
            for each in self.path.iterdir():
                name = _NAME.fullmatch(each.name)
                if name and each.is_dir() and not each.is_symlink():
                    found[int(name[1])] = each
        return dict(sorted(found.items()))

    def candidates(self) -> list[tuple[int, Path]]:
        """What may be a checkpoint; also the folder itself, if session.save() made it."""
        found = list(self.steps().items())
        if has_manifest(self.path):
            found.append((Manifest.read(self.path).step, self.path))
        return found

    def check_unused(self) -> None:
        """Refuse to mix two trainings. See [Note: one line]."""
        complete = [step for step, path in self.steps().items() if has_manifest(path)]
        if complete:
            raise CheckpointError(
                f"Config.checkpoint_dir {str(self.path)!r} holds checkpoints up to step "
                f"{complete[-1]}, and this training does not go on from them. Start it with "
                f"--resume to go on, or give another folder, or remove them"
            )

    def prune(self, step: int, keep: int) -> list[Path]:
        """Remove all but the last checkpoints, what interrupted saves left, and later steps.

        What a save did not make is left alone, whatever its name. Says what is gone.
        """
        ours = {each: path for each, path in self.steps().items() if made_by_save(path)}
        complete = [each for each in ours if has_manifest(ours[each]) and each <= step]
        gone = [path for each, path in ours.items() if each not in complete[-keep:]]
        for path in gone:
            _remove(path)
        return gone


def _remove(path: Path) -> None:
    """Only what `made_by_save` has named; the manifest goes first, so that no damage is seen."""
    for each in made_by_save(path):
        with contextlib.suppress(FileNotFoundError):
            each.rmdir() if each.is_dir() else each.unlink()
    path.rmdir()
