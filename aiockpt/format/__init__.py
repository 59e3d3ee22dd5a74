"""The bytes of a checkpoint: framing, metadata and manifest. Pure functions, no I/O."""
