"""Fuzzing of everything that reads a checkpoint: mutations, the files they replace, and the permitted outcomes."""
