"""Files and commits; sees names and bytes, and recognises checkpoints."""
