"""``aiockpt demo``: a model trains, dies in the middle of a save, and resumes exactly.

`model` is plain PyTorch, `train` is the loop to copy. The rest starts them as processes of their own, kills
one, compares, and shows what happened.
"""
