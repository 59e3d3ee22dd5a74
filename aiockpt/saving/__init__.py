"""One save, from the snapshot to the result."""
