"""Rounds of messages between ranks."""
