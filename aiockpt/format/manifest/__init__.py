"""The manifest `.aiockpt.json`, with the index in columns."""
