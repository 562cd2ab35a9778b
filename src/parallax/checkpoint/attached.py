"""What a script attaches to its session: schedulers, scalers, counters of its own."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from parallax.checkpoint.plain import owned, plain
from parallax.errors import CheckpointError, ConfigError

_log = logging.getLogger("parallax")


class Attached:
    """Things with `state_dict()` and `load_state_dict()`, by name; rank 0's state is kept."""

    def __init__(self, *, warns: bool) -> None:
        self._things: dict[str, Any] = {}
        self._waiting: dict[str, Any] | None = None
        """States of the checkpoint that was loaded, of what is yet to be attached."""
        self._warns = warns

    def add(self, name: str, thing: Any) -> bool:
        """Says whether its state was restored from the checkpoint that was loaded before."""
        if not isinstance(name, str) or self._things.get(name, thing) is not thing:
            raise ConfigError(f"attach() takes a name of its own for each thing, not {name!r}")
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(thing, method, None)):
                raise ConfigError(
                    f"attach({name!r}, …) takes something with state_dict() and "
                    f"load_state_dict(), and a {type(thing).__name__} has no {method}()"
                )
        self._state(name, thing)  # what cannot be saved is refused now, not in an hour
        self._things[name] = thing
        return self._waiting is not None and self._restore(name, self._waiting)

    def states(self) -> dict[str, Any]:
        return {name: self._state(name, thing) for name, thing in self._things.items()}

    def restore(self, saved: Mapping[str, Any]) -> None:
        self._waiting = dict(saved)
        for name in self._things:
            self._restore(name, self._waiting)

    def check_all_taken(self) -> None:
        """Training goes on: what the checkpoint has and nobody attached is lost. Warns once."""
        names, self._waiting = sorted(self._waiting or ()), None
        if names and self._warns:
            _log.warning(
                "the checkpoint holds the state of %s, which the script has not attached: call "
                "session.attach(name, thing) before the first step",
                ", ".join(map(repr, names)),
            )

    def _restore(self, name: str, saved: dict[str, Any]) -> bool:
        if name not in saved:
            if self._warns:
                _log.warning(
                    "the checkpoint has no state of %r, which stays as it is (it has %s)",
                    name,
                    ", ".join(map(repr, sorted(saved))) or "none of anything attached",
                )
            return False
        try:
            self._things[name].load_state_dict(owned(saved.pop(name)))
        except Exception as error:
            raise CheckpointError(
                f"{name!r}, a {type(self._things[name]).__name__}, does not take the state that "
                f"the checkpoint has of it: {error or type(error).__name__}"
            ) from error
        return True

    @staticmethod
    def _state(name: str, thing: Any) -> Any:
        return plain(thing.state_dict(), f"the state of {name!r}, which is attached,")
