"""Pickles read without executing them, by a machine with bounded time and memory."""
