"""The bytes of every file format; pure."""
