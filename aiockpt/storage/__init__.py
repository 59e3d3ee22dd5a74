"""Where checkpoints are kept. Knows bytes, names and durability, nothing of tensors."""
