"""Benchmarks of aiockpt, its peers and the machine's limit, measured in one run.

``python -m benchmarks save`` measures saves, prints a table and the project's targets ("bars"), and writes the figures
of every round to a JSON file. ``python -m benchmarks --help`` lists the other benchmarks.

The rules: all contenders run in one process on the same state. Each runs once per round, in an order that rotates,
after a warm-up run that does not count. Files are removed and the disk is idle between runs. Each peer has the best
settings that its documentation names, and is as durable as aiockpt, or its row says what is missing. If a contender
fails, its row shows the error.
"""
