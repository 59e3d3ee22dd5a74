"""``aiockpt bench``: what a disk can do, and the settings to use on it."""
