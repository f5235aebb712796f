"""One small module a command of `tra`; see `traformer.cli` for how they are found."""
