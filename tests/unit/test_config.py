"""Options: defaults, TOML, keywords, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from parallax.config import Config
from parallax.errors import ConfigError


def test_toml_and_keywords(tmp_path: Path) -> None:
    file = tmp_path / "parallax.toml"
    file.write_text('timeout_seconds = 7\nlazy = ["emb*"]\n[routes]\n"out.*" = "sharded"\n')
    config = Config.load(file).replace(seed=3)
    assert (config.timeout_seconds, config.seed) == (7, 3)
    assert config.route_of("out.weight") == "sharded"
    assert config.route_of("other") is None
    assert config.is_lazy("emb.weight")
    assert not config.is_lazy("out.weight")


def test_the_first_pattern_wins() -> None:
    config = Config(routes={"a.*": "all-reduce", "*": "sharded"})
    assert config.route_of("a.weight") == "all-reduce"
    assert config.route_of("b.weight") == "sharded"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"routes": {"a": "split"}}, "'split'; allowed are 'all-reduce' and 'sharded'"),
        ({"routes": ["a"]}, "takes a mapping"),
        ({"lazy": "emb"}, "a bool or a list of patterns, not 'emb'"),
        ({"wire": "fp16"}, "wire is 'fp16'; allowed are 'float32', 'bf16', 'int8'"),
        ({"merge_hosts": 1}, "merge_hosts takes true or false, not 1"),
        ({"timeout_seconds": 0}, "must be a positive number, not 0"),
        ({"timeout_seconds": float("nan")}, "must be a positive number"),
        ({"bucket_megabytes": -1}, "must be a positive number, not -1"),
        ({"ledger_steps": 0}, "at least 1, not 0"),
        ({"checkpoint_steps": 0}, "checkpoint_steps must be a whole number of at least 1, not 0"),
        ({"checkpoint_steps": 2.5}, "whole number of at least 1, not 2.5"),
        ({"checkpoint_seconds": 0}, "checkpoint_seconds must be a positive number, not 0"),
        ({"checkpoint_keep": 0}, "checkpoint_keep must be a whole number of at least 1, not 0"),
        ({"checkpoint_keep": True}, "at least 1, not True"),
        ({"checkpoint_dir": ""}, "takes the path of a folder, not ''"),
        ({"checkpoint_dir": 3}, "takes the path of a folder, not 3"),
    ],
)
def test_wrong_values_are_named(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Config(**options)


def test_unknown_options_and_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown option 'rutes'; the options are routes"):
        Config().replace(rutes={})
    with pytest.raises(ConfigError, match="cannot read the configuration"):
        Config.load(tmp_path / "none.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("lazy = ")
    with pytest.raises(ConfigError, match="cannot read"):
        Config.load(broken)
    with pytest.raises(ValueError, match="unknown"):  # a ConfigError is a ValueError too
        Config().replace(nothing=1)
