"""Files of torch.save."""
