"""Checkpoints on a POSIX file system: direct I/O, atomic commits, orphans."""
