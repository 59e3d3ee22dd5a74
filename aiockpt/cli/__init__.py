"""The command line: ``aiockpt``, or ``python -m aiockpt``."""
