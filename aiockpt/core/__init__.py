"""Threads, futures, parameter objects and machine facts; nothing about checkpoints."""
