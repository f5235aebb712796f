"""One small module per command of `tra`; see `traformer.cli` for how they are found."""
