"""Decisions about a checkpoint: structure, buckets, file images, ranges. Pure functions, no I/O."""
