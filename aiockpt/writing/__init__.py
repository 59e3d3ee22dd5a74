"""From a chunk to a file to a committed checkpoint; knows no torch."""
