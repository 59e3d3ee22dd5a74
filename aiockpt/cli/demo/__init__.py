"""``aiockpt demo``: a model trains, dies in the middle of a save, and resumes exactly.

`model` is the model with its state, `train` is the loop to copy. The other modules run them as processes, kill one,
compare, and show the results.
"""
