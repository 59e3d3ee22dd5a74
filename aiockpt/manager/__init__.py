"""Runs: numbered checkpoints in one directory, when to save them, which to keep, and random number generators."""
