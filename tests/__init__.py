"""Tests of aiockpt."""

import os
import sys

# Before torch is imported, here and in child processes: its threads spin for milliseconds when they have nothing to do,
# which takes the processors from the other test processes.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Nor are there processes that compile, which torch 2.6 starts ahead and leaves.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

# Hundreds of child processes import the package: compiling it anew in each would cost more than the tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
