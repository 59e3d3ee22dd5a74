"""``python -m aiockpt``."""

from aiockpt.cli.main import app

app(prog_name="aiockpt")
