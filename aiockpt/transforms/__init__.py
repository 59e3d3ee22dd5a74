"""Transforms of stored items: compression, and what users add, such as encryption. Free of torch."""
