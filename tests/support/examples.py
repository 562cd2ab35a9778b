"""The scripts of the examples folder: run as a user runs them, or imported."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def load(name: str) -> ModuleType:
    """A module of the folder, which finds the ones beside it as its script does."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(EXAMPLES))


def run_example(
    name: str, *arguments: object, workers: int = 2, variables: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "parallax.launch.command", "run", "-n", str(workers)]
    command += [str(EXAMPLES / name), *map(str, arguments)]
    # One thread: a few cores are shared by two workers and whatever else runs.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **(variables or {})}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150)


def figure(done: subprocess.CompletedProcess[str], title: str) -> float:
    """The number that stands after `title` in what an example printed."""
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(rf"{title} (-?[\d.]+)", done.stdout)
    assert found, done.stdout + done.stderr
    return float(found[1])
