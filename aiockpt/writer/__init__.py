"""A writer process: it computes CRCs, writes and commits what the trainer stages into memory that both map."""
