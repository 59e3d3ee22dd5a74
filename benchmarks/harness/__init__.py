"""Tools of every benchmark: the states, rounds that treat all contenders alike, and the time limits."""
