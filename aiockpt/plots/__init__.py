"""Pictures of results, by matplotlib: ``pip install 'aiockpt[plots]'``."""

from aiockpt.plots.timeline import timeline as timeline

__all__ = ["timeline"]
