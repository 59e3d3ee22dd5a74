"""aiockpt, its peers and the limit of the machine, side by side in one run.

``python -m benchmarks save`` measures, prints a table with the bars the project holds itself to, and leaves
the figures of every round in a JSON file. ``python -m benchmarks --help`` lists what else there is.

The rules: one process, the same state, as many rounds as it takes for a median; everybody once in each round,
in an order that rotates; a first run of each that does not count; files removed and the disk idle in between;
every peer at the best setting its documentation names, and as durable, or the table says what is missing.
Whoever fails keeps a row with the error.
"""
