"""The machine: its facts, a known state before a measurement, and the same bytes moved by system calls alone."""
