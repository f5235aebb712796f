"""`python -m traformer` is `tra`; under torchrun or accelerate launch it is one of its processes."""

from traformer.cli import leave, main

if __name__ == "__main__":
    leave(main())
