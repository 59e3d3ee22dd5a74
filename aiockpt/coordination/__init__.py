"""How the ranks of a distributed program agree on a save or a load."""
