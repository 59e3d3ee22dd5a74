"""The plan of several ranks: DCP calls these local plan and global plan."""
