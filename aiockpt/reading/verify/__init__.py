"""The check of every byte of a checkpoint."""
