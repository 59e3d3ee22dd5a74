"""What every benchmark uses: the states, rounds that treat all contenders alike, and the time limits."""
