"""What commands pass to one another: a run's config, folder, checkpoints and measurements."""
