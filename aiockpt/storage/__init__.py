"""Files and commits; sees names and bytes only."""
