"""Small checkpoints that were written once and are kept: whatever is changed, they have to load."""
