"""The safetensors format: headers, sets of files, writing."""
