"""Save and load at any number of workers, plain torch included.

    DIR/manifest.json              which folder is the newest complete one; replaced in one step
    DIR/step-00000120-1f3a…/
        dense.pt                   from rank 0: parameters and state that every worker has
        part-00000-of-00004.pt     from each worker: its rows of tables and of their state

A crash leaves the old manifest and the folder it names. No process holds a whole table: each
reads from all parts the rows that it owns now. Nothing is unpickled but tensors and plain values.

    contents   ── what there is to save or to fill       manifest  ── what a checkpoint consists of
    writer     ── save()                                 reader    ── the files, mapped into memory
    restorer   ── load()                                 exporter  ── export()
    generators ── the states of random generators        plain     ── values that can be read again
    together   ── all workers do a thing, or none goes on
"""

from parallax.checkpoint.contents import Contents, Restored
from parallax.checkpoint.exporter import Exported, export
from parallax.checkpoint.restorer import load
from parallax.checkpoint.together import LOADING, SAVING
from parallax.checkpoint.writer import save

__all__ = ["LOADING", "SAVING", "Contents", "Exported", "Restored", "export", "load", "save"]
