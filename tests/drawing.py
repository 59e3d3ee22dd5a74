"""Drawing by matplotlib without a display."""

from __future__ import annotations

import io

import pytest


def warm() -> None:
    """Draw once before file descriptors are counted: matplotlib keeps the files of fonts open."""
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, ax = pyplot.subplots()
    ax.set_title("a")
    figure.savefig(io.BytesIO())
    pyplot.close("all")
