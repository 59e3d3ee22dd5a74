"""The page of ``aiockpt inspect --html``: a checkpoint's keys, sizes, files and values, in one file."""
