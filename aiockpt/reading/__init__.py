"""Opening, loading, streaming and verifying checkpoints."""
