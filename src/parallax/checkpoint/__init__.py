"""Save and load at any number of workers, plain torch included.

    DIR/manifest.json              which folder is the newest complete one; replaced in one step
    DIR/step-00000120-1f3a…/
        dense.pt                   from rank 0: parameters and state that every worker has
        part-00000-of-00004.pt     from each worker: its rows of tables and of their state

A crash leaves the old manifest and the folder it names. No process holds all rows of a table: each
reads the rows that it owns now from all parts. Only tensors and plain values are unpickled.

    state      ── the live state of a training           manifest  ── what a checkpoint consists of
    contents   ── what is saved, or filled by load()
    writer     ── save()                                 reader    ── the files, mapped into memory
    restorer   ── load()                                 exporter  ── export()
    generators ── the states of random generators        plain     ── values that can be read again
    together   ── an action on all workers; if it fails on one, all raise

Besides the script's own `save` and `load`, a session saves and resumes automatically:

    schedule   ── when a save is due                     folder    ── the checkpoints of a training
    autosave   ── at which moment it is made             newest    ── the one to resume from
    attached   ── schedulers and other objects of a script
    progress   ── all of this for one session
"""

from parallax.checkpoint.attached import Attached
from parallax.checkpoint.autosave import Autosave
from parallax.checkpoint.contents import Contents, Restored
from parallax.checkpoint.exporter import Exported, export
from parallax.checkpoint.folder import Folder
from parallax.checkpoint.newest import load_newest
from parallax.checkpoint.restorer import load
from parallax.checkpoint.schedule import Schedule
from parallax.checkpoint.state import TrainingState
from parallax.checkpoint.together import LOADING, SAVING
from parallax.checkpoint.writer import save

__all__ = [
    "LOADING",
    "SAVING",
    "Attached",
    "Autosave",
    "Contents",
    "Exported",
    "Folder",
    "Restored",
    "Schedule",
    "TrainingState",
    "export",
    "load",
    "load_newest",
    "save",
]
