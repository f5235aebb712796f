"""`python -m traformer` is `tra`."""

from traformer.cli import main

raise SystemExit(main())
