"""Follows a run: yields each new version of its checkpoints, and loads only what has changed."""
