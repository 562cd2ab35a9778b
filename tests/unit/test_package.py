"""The public surface: every name is there, importing does nothing, one way of imports."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import parallax

SOURCE = Path(parallax.__file__).parent
ORDER = (
    "errors text comm.compression comm.threads config init nn cluster observability planning "
    "tables comm planning.links observability.run_log planning.tuner planning.speed "
    "planning.touched_rows planning.host_merging planning.replan planning.adaptive_plan data "
    "engine checkpoint training setup api"
).split()


def test_every_public_name_resolves() -> None:
    for name in parallax.__all__:
        assert getattr(parallax, name) is not None
    assert dir(parallax) == sorted(parallax.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        parallax.nothing  # noqa: B018


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import parallax, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_modules_import_only_what_stands_before_them() -> None:
    """The order is the data's way; see docs/how-it-works.md."""
    for file in SOURCE.rglob("*.py"):
        room = _room(file.relative_to(SOURCE).with_suffix("").parts)
        if room in ("__init__", "launch"):
            continue
        for other in _imported(file):
            assert ORDER.index(other) <= ORDER.index(room), f"{file} imports {other}"


def test_the_launcher_leaves_torch_to_the_agent() -> None:
    for file in (SOURCE / "launch").rglob("*.py"):
        names = {name.split(".")[0] for name in _top_level_imports(file)}
        assert "torch" not in names or file.name in ("agent.py", "rendezvous.py"), file


def test_a_check_of_hosts_does_not_import_torch() -> None:
    """Also not by way of another module: it runs where torch may be missing."""
    code = "import parallax.launch.check.survey, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def _top_level_imports(file: Path) -> list[str]:
    found = []
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append(str(node.module))
    return found


def _imported(file: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "parallax":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("parallax."):
            parts = str(node.module).split(".")[1:]
            found |= {_room([*parts, alias.name]) for alias in node.names} | {_room(parts)}
    return found


def _room(parts: Sequence[str]) -> str:
    """The module's own entry in ORDER, or that of its folder."""
    names = (".".join(parts[:size]) for size in range(len(parts), 0, -1))
    return next((name for name in names if name in ORDER), parts[0])
