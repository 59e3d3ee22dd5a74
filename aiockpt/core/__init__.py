"""Threads, futures and machine facts: nothing about checkpoints."""
