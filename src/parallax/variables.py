"""Environment variables by which `parallax run` tells a session something."""

from __future__ import annotations

RESUME = "PARALLAX_RESUME"
"""Where the job's checkpoints are, to begin from the newest."""

STEP_FILE = "PARALLAX_STEP_FILE"
"""Where to leave the number of steps."""

LINK_RATE = "PARALLAX_LINK_RATE"
"""Bytes a second of the slowest link between the hosts, as `parallax check` has kept it."""

INTERFACE = "PARALLAX_INTERFACE"
"""The network interface that the launcher has chosen, because nobody named one."""
