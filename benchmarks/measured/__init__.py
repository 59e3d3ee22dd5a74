"""Benchmarks that run in one process: a module for each."""
