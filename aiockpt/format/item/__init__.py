"""One item of a DCP checkpoint: the image of a torch.save file."""
