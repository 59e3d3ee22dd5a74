"""Copying tensors into staging memory: the pool of chunks, and a stager for each kind of device."""
