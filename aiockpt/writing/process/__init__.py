"""The writer process: started, driven and outlived by none of its trainers."""
