"""Who trains: Parallax and what people would use instead.

Each engine's module has `start(task)`, which joins the other workers, makes the model as the
engine's own documentation recommends, and returns `turn(num_steps) -> loss`. `ENGINES` tells which
module and options stand behind a name; nothing here imports a framework.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

ENVIRONMENTS = Path(__file__).resolve().parents[2] / ".venv-peers"
"""A virtualenv for each peer, made by `make peer-<name>`."""


@dataclass(frozen=True)
class Engine:
    """How an engine is started and what is known of it before."""

    title: str
    module: str
    options: dict[str, object] = field(default_factory=dict)
    environment: str | None = None
    """The virtualenv that it needs; None for the one that runs the benchmark."""
    packages: tuple[str, ...] = ("torch",)
    """Whose versions are recorded."""
    replicates: bool = True
    """Whether each worker has all rows of the tables."""
    is_synchronous: bool = True
    rounds: bool = False
    """Whether it rounds, or skips updates of untouched rows, so that its losses may differ."""
    waits_in_update: bool = False
    """Whether its update also waits for the exchange, so that the span says little."""
    num_processes: int = 1
    """Of a worker."""
    settling_steps: int = 0
    """In which it finds its way with tables; they are not timed."""
    root: Path | None = None
    """The checkout whose sources its workers run; None for this one."""

    @property
    def python(self) -> Path:
        if self.environment is None:
            return Path(sys.executable)
        return ENVIRONMENTS / self.environment / "bin" / "python"

    @property
    def missing(self) -> str | None:
        """Why it cannot run, if so."""
        if self.root is not None and not (self.root / "benchmarks" / "worker.py").exists():
            return f"{self.root} is no checkout of Parallax"
        if self.environment is None or (self.python.parent.parent / "installed").exists():
            return None
        return f"not installed: `make peer-{self.environment}`"


OURS = "parallax"
ALONE = "alone"
_OURS = Engine("Parallax", "parallax", replicates=False, settling_steps=190)


def ours(title: str = _OURS.title, rounds: bool = False, **config: object) -> Engine:
    """Parallax with these options of its `Config`."""
    return replace(_OURS, title=title, rounds=rounds, options={"config": config})


_NAMED = {
    OURS: ours(),
    "ddp-sparse": Engine("DDP sparse", "ddp", {"sparse": True}),
    "ddp-dense": Engine("DDP dense", "ddp", {"sparse": False}),
    "horovod": Engine(
        "Horovod",
        "horovod",
        environment="horovod",
        packages=("torch", "horovod"),
        waits_in_update=True,
    ),
    "torchrec": Engine(
        "TorchRec row-wise",
        "torchrec",
        {"sharding": "row_wise"},
        environment="torchrec",
        packages=("torch", "torchrec", "fbgemm-gpu-cpu"),
        replicates=False,
    ),
    "torchrec-table": Engine(
        "TorchRec table-wise",
        "torchrec",
        {"sharding": "table_wise"},
        environment="torchrec",
        packages=("torch", "torchrec", "fbgemm-gpu-cpu"),
        replicates=False,
    ),
    "deepspeed": Engine(
        "DeepSpeed", "deepspeed", environment="deepspeed", packages=("torch", "deepspeed")
    ),
    "tensorflow": Engine(
        "TensorFlow PS",
        "tensorflow",
        environment="tensorflow",
        packages=("tensorflow-cpu",),
        replicates=False,
        is_synchronous=False,
        num_processes=3,
    ),
    ALONE: Engine("no exchange", "alone"),
    **{
        f"parallax-{wire}": ours(f"Parallax {wire}", rounds=True, wire=wire)
        for wire in ("bf16", "int8")
    },
    "parallax-lazy": ours("Parallax lazy", rounds=True, lazy=True),
    # Also where the plan would have a table whole.
    "parallax-sharded": ours("Parallax sharded", routes={"tables.*": "sharded"}),
    # The rows that a worker of `lm` touches in most steps are all-reduced. Emulated layers only.
    "parallax-hot": replace(
        _OURS,
        title="Parallax, hot rows apart",
        options={
            "config": {"routes": {"tables.[23].weight": "all-reduce"}},
            "hot_rows": (64, 512),
        },
    ),
}


class _Engines(dict[str, Engine]):
    """Engines by name; `parallax@PATH` is Parallax as another checkout has it, with its own
    benchmarks, so that two versions can take turns."""

    def __missing__(self, name: str) -> Engine:
        kind, _, path = name.partition("@")
        if kind != OURS or not path:
            raise KeyError(name)
        root = Path(path).resolve()
        return replace(ours(f"Parallax at {root.name}"), root=root)


ENGINES = _Engines(_NAMED)
