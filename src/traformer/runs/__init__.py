"""What commands hand one another: a run's config, folder, checkpoints and measurements."""
