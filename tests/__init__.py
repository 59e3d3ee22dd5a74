"""Tests of aiockpt."""

import os

# Before torch is imported, here and in child processes: its threads spin for milliseconds when they have nothing to do,
# which takes the processors from the other test processes.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
