"""Pickle machines that read pickles without executing them, in bounded time and memory."""
