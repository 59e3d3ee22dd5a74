"""The crash laboratory: a ptrace tracer that records, refuses and kills at system calls, and a model of power loss."""
