"""What is measured in one process: a module for each benchmark."""
