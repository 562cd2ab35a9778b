"""Several hosts on one machine, for tests and benchmarks: see `Testbed`.

[Note: nothing outside]
All that a test bed makes lives in namespaces whose first processes (`init.py`) watch the process
that made the bed: hosts, switch, links, mounts, keys. None of it is ever in the machine's own
namespaces, so there is nothing there to mistake for it, and the kernel removes it with those
processes however the maker ends. The exception are cgroups (`quota.py`), whose names say who made
them.
"""

from benchmarks.testbed.bed import Counters, Host, Process, Testbed
from benchmarks.testbed.namespace import TestbedError

__all__ = ["Counters", "Host", "Process", "Testbed", "TestbedError"]
