"""A state dict held still while training goes on: capture, shards, change detection."""
