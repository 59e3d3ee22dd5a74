"""Small checkpoints that were written once and are kept: every later version has to load them."""
