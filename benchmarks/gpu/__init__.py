"""A GPU: staging, the optimizer step during a save, training beside a save, and saves and loads end to end."""
