"""Many runs: cells, the local processes or the Ray cluster that run them, and the view of their progress."""
