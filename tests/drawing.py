"""Drawing by matplotlib without a display."""

from __future__ import annotations

import io

import pytest


def warm() -> None:
    """Have the files of fonts open, which stay so, before file descriptors are counted."""
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, ax = pyplot.subplots()
    ax.set_title("a")
    figure.savefig(io.BytesIO())
    pyplot.close("all")
