"""export(): one file that plain PyTorch reads."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parallax.checkpoint.reader import Reader
from parallax.errors import CheckpointError, ConfigError


@dataclass(frozen=True)
class Exported:
    """What `export` wrote."""

    num_tensors: int
    size_bytes: int


def export(path: str | Path, out: str | Path) -> Exported:
    """Write a plain state dict that the single-device script loads with `load_state_dict`."""
    path, out = Path(path), Path(out)
    if out.suffix not in (".pt", ".pth", ".safetensors"):
        raise ConfigError(
            f"cannot export to {str(out)!r}: its name must end in .pt, .pth or .safetensors"
        )
    reader = Reader(path)
    reader.verify(reader.manifest.files)
    reader.open()
    keys: dict[str, str] = reader.dense["keys"]
    tensors = {name: reader.tensor(name) for name in dict.fromkeys(keys.values())}
    state = {key: tensors[name] for key, name in keys.items()} | reader.dense["extra"]
    temporary = out.with_name(f".{out.name}.new")
    try:
        _write(state, temporary, out.suffix)
        os.replace(temporary, out)
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"cannot write {str(out)!r}: {error}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
    return Exported(len(state), out.stat().st_size)


def _write(state: dict[str, Any], path: Path, suffix: str) -> None:
    with path.open("wb") as file:
        if suffix != ".safetensors":
            torch.save(state, file)
            return
    _write_safetensors(state, path)


def _write_safetensors(state: dict[str, Any], path: Path) -> None:
    try:
        from safetensors import SafetensorError
        from safetensors.torch import save_file
    except ImportError:
        raise ConfigError(
            "writing .safetensors needs the package safetensors: pip install safetensors, or "
            "export to a .pt file"
        ) from None
    try:
        save_file(_separate(state), path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(str(error)) from error


def _separate(state: dict[str, Any]) -> dict[str, Tensor]:
    """The format knows neither tied nor strided tensors: each key gets one of its own."""
    found: dict[str, Tensor] = {}
    for key, value in state.items():
        if not isinstance(value, Tensor):
            raise ConfigError(
                f"a .safetensors file holds only tensors, but {key!r} is a {type(value).__name__}: "
                "export to a .pt file"
            )
        tied = any(value is other for other in found.values())
        found[key] = value.clone() if tied else value.contiguous()
    return found
