"""Conversions between DCP checkpoints and files of torch.save."""
