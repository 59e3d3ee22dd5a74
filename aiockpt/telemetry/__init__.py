"""What saves and loads report about themselves: progress, results, timelines, and the interface of observers."""
