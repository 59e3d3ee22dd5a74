"""``aiockpt demo``: a model trains, dies in the middle of a save, and resumes exactly.

`model` is the model with its state, `train` is the loop to copy, `watch` shows and measures it. `run` compares ways to
save, starts the process that dies, and compares the results.
"""
