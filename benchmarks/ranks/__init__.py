"""Several ranks: processes that save and load together, and simulated worlds of very many ranks."""
