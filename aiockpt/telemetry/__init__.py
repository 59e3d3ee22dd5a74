"""Reports of saves and loads: progress, results, timelines, and the interface of observers."""
