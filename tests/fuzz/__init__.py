"""Fuzzing of everything that reads a checkpoint: what to try, on which file, and what may come of it."""
