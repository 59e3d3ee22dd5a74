"""Tests that try to break it: kills, loss of power, faults, cancellations, hostile files, and the soak."""
