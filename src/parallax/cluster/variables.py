"""Environment variables that `parallax run` sets for a session."""

from __future__ import annotations

RESUME = "PARALLAX_RESUME"
"""Folder of the job's checkpoints; the session resumes from the newest."""

STEP_FILE = "PARALLAX_STEP_FILE"
"""File to which a worker writes its number of steps."""

LINK_RATE = "PARALLAX_LINK_RATE"
"""Bytes per second of the slowest link between the hosts, as `parallax check` measured it."""

INTERFACE = "PARALLAX_INTERFACE"
"""The network interface that the launcher chose, because the user named none."""
