"""Transforms of items: compression, and those of users."""
