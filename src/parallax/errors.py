"""Every error that Parallax raises on purpose.

    ParallaxError
     ├─ ConfigError          a wrong argument, option or field (also a ValueError)
     │   └─ HostsFileError   the file that names the hosts of a job cannot be used
     ├─ UnsupportedError     something that cannot be trained exactly (also a NotImplementedError)
     ├─ WholeTableError      an operation that needs all rows of a sharded table
     ├─ MismatchError        the workers were given different models or settings
     ├─ PeerError            something that another worker caused
     │   ├─ OutOfStepError   the workers are in different operations
     │   ├─ WaitTimeoutError a wait for other workers took too long (also a TimeoutError)
     │   └─ WorkerLostError  another worker ended or lost its connection
     ├─ CheckpointError      a checkpoint is damaged, foreign or does not fit
     ├─ LinkError            two hosts have no connection, or it could not be measured
     └─ LaunchError          the workers could not be started

An error names what was received, what is allowed and the way out.
"""

from __future__ import annotations


class ParallaxError(Exception):
    """The root of the tree."""

    step: int | None = None
    """How many steps this worker had completed, where that is known."""


class ConfigError(ParallaxError, ValueError):
    """A wrong argument, option or field."""


class HostsFileError(ConfigError):
    """The file that names the hosts of a job cannot be used."""


class UnsupportedError(ParallaxError, NotImplementedError):
    """Something that cannot be trained exactly, and is therefore refused."""


class WholeTableError(ParallaxError, RuntimeError):
    """An operation that needs all rows of a table that is sharded by rows."""


class MismatchError(ParallaxError, RuntimeError):
    """The workers were given different models, optimizers or settings."""


class PeerError(ParallaxError, RuntimeError):
    """Something that another worker caused; never the first failure of a job."""


class OutOfStepError(PeerError):
    """The workers are in different operations."""


class WaitTimeoutError(PeerError, TimeoutError):
    """A wait for other workers took longer than `Config.timeout_seconds`."""


class WorkerLostError(PeerError):
    """Another worker ended, or its connection broke."""


class CheckpointError(ParallaxError, RuntimeError):
    """A checkpoint is damaged, foreign, or does not fit the model."""


class LinkError(ParallaxError, RuntimeError):
    """Two hosts have no connection, or the connection could not be measured."""


class LaunchError(ParallaxError, RuntimeError):
    """The workers could not be started."""
