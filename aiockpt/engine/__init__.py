"""The engine: its loop thread, the queue of saves, its resources, and the submission of saves."""
