"""The crash laboratory: system calls seen, refused and killed at with ptrace, and a model of lost power."""
