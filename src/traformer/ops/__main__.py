"""`python -m traformer.ops` says which backends this machine has, and why another is missing."""

from __future__ import annotations

from traformer.ops.threshold_relative.backends import BACKENDS, unavailable_reason


def main() -> None:
    for name in BACKENDS:
        reason = unavailable_reason(name)
        print(f"backend {name}: {'ready' if reason is None else 'not here: ' + reason}")
    if unavailable_reason("cpu") is not None:
        print("attention on the CPU uses the slower pure-torch path")


if __name__ == "__main__":
    main()
