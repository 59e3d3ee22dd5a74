"""Copies between tensors and chunks of staging memory; knows devices."""
