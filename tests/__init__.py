"""Tests of aiockpt."""

import os
import sys

# Set before torch is imported, here and in child processes: its idle OpenMP threads spin for milliseconds, which takes
# the cores from the other test processes.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# No compile workers: torch 2.6 starts them in advance and leaves them running.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

# Hundreds of child processes import the package: compiling it anew in each would cost more than the tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
