"""The writer process: writes and commits for a trainer, and outlives it until what was staged is durable."""
