"""Ready-made displays of the progress of saves, loads and verifications: bars and log lines.

::

    save = ckpt.save(state, "runs/a/step-100")
    aiockpt.progress.bar(save)                  # in a terminal or a notebook; elsewhere it shows nothing
    aiockpt.progress.log(save)                  # as lines of the log
    await ckpt.load("runs/a/step-100", progress=aiockpt.progress.bar())
"""

from aiockpt.progress.display import Display as Display
from aiockpt.progress.display import bar as bar
from aiockpt.progress.display import log as log

__all__ = ["Display", "bar", "log"]
