"""DCP's `.metadata`, written and read without torch's classes."""
