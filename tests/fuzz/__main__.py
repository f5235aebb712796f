"""The campaign's command line; see the package."""

from __future__ import annotations

import argparse
import faulthandler
import hashlib
import resource
import secrets
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hypothesis import HealthCheck, Phase, given, seed, settings
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import tests.conftest  # noqa: F401  draws depend on the seed alone
from tests.fuzz.targets import TARGETS, Target

BATCH = 100  # problems drawn from one seed: what `--batch` repeats
MOST_MEMORY = 6 << 30  # bytes of address space; a campaign needs about 2
MOST_FINDINGS = 3  # of one target; then it is left out of the rest


@dataclass(frozen=True)
class Finding:
    target: str
    batch: int
    text: str  # the smallest case that fails, and how


def batch_seed(campaign: int, target: str, batch: int) -> int:
    digest = hashlib.sha256(f"{campaign}/{target}/{batch}".encode()).digest()
    return int.from_bytes(digest[:8], "big")


def run_batch(target: Target, campaign: int, batch: int, count: int) -> Finding | None:
    """Draw and check `count` problems; what fails is shrunk."""

    @seed(batch_seed(campaign, target.name, batch))
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
        report_multiple_bugs=False,
        print_blob=False,
    )
    @given(case=target.cases)
    def problem(case: object) -> None:
        target.check(case)

    try:
        problem()
    except Exception as error:
        notes = "\n".join(getattr(error, "__notes__", ()))
        message = f"{type(error).__name__}: {str(error)[:2000]}"
        return Finding(target.name, batch, f"{notes[:3000]}\n{message}")
    return None


def plan(names: Sequence[str], count: int) -> list[tuple[str, int, int]]:
    """(target, batch, problems), the targets' batches taken in turn so that each is met early."""
    shares = sum(TARGETS[name].share for name in names)
    batches = []
    for name in names:
        wanted = max(1, round(count * TARGETS[name].share / shares))
        sizes = [min(BATCH, wanted - start) for start in range(0, wanted, BATCH)]
        batches += [((n + 0.5) / len(sizes), name, n, size) for n, size in enumerate(sizes)]
    return [(name, n, size) for _, name, n, size in sorted(batches)]


def campaign(
    seed: int, count: int, names: Sequence[str], batch: int | None, console: Console, skip: int = 0
) -> list[Finding]:
    """Run the plan, or one batch of each target. skip: the plan's first problems, solved before."""
    todo = [(name, batch, BATCH) for name in names] if batch is not None else plan(names, count)
    findings: list[Finding] = []
    solved = skip
    try:
        for done in _solve(seed, todo, skip, findings, console):
            solved = max(solved, done)
    except KeyboardInterrupt:
        again = f"python -m tests.fuzz --seed {seed} --count {count} --skip {solved}"
        console.print(f"stopped after {solved} problems; continue with: {again}", markup=False, highlight=False)
        raise SystemExit(130) from None
    return findings


def _solve(
    seed: int, todo: list[tuple[str, int, int]], skip: int, findings: list[Finding], console: Console
) -> Iterator[int]:
    """Solve batch after batch, each finding added to `findings`; yields how many problems are done."""
    columns = (TextColumn("{task.description:24}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        total = sum(size for *_, size in todo)
        bar = progress.add_task("", total=total)
        done = 0
        for name, number, size in todo:
            done += size
            if done > skip:
                progress.update(bar, description=name)
                if sum(found.target == name for found in findings) < MOST_FINDINGS:
                    found = run_batch(TARGETS[name], seed, number, size)
                    if found is not None:
                        findings.append(found)
                        report(found, seed, console)
                if not console.is_terminal and done * 100 // total > (done - size) * 100 // total:  # 100 lines in a log
                    console.print(f"{done} of {total} problems, {len(findings)} findings", highlight=False)
            progress.update(bar, completed=done)
            yield done


def report(found: Finding, seed: int, console: Console) -> None:
    console.rule(found.target)
    console.print(found.text, markup=False, highlight=False)
    again = f"python -m tests.fuzz --seed {seed} --only {found.target} --batch {found.batch}"
    console.print(f"repeat with: {again}", markup=False, highlight=False)


def limit_memory() -> None:
    """A case that asks for too much becomes a finding (MemoryError) instead of a machine without memory."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = MOST_MEMORY if hard == resource.RLIM_INFINITY else min(hard, MOST_MEMORY)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, help="repeat a campaign (default: a fresh seed, which is printed)")
    parser.add_argument("--count", type=int, default=100_000, help="problems in all (default: 100000)")
    parser.add_argument(
        "--only", nargs="+", metavar="TARGET", help=f"some of {', '.join(TARGETS)}, or their beginnings"
    )
    parser.add_argument("--batch", type=int, help="only this batch of each target, as a finding names it")
    parser.add_argument("--skip", type=int, default=0, help="leave out this many problems, to continue a campaign")
    given = parser.parse_args(arguments)
    names = [name for name in TARGETS if not given.only or any(name.startswith(start) for start in given.only)]
    if not names or given.count < 1:
        parser.error("nothing to do: no target has such a name" if not names else "--count must be at least 1")
    faulthandler.enable()  # a crash of the kernel says where it was
    limit_memory()
    console = Console(width=None if sys.stdout.isatty() else 120)
    seed = secrets.randbits(32) if given.seed is None else given.seed
    console.print(f"seed {seed}: {given.count} problems over {len(names)} targets", highlight=False)
    start = time.monotonic()
    findings = campaign(seed, given.count, names, given.batch, console, given.skip)
    seconds = time.monotonic() - start
    verdict = "nothing found" if not findings else f"{len(findings)} findings, see above"
    console.print(f"seed {seed}: {verdict} ({seconds:.0f} s)", highlight=False)
    return 1 if findings else 0


if __name__ == "__main__":
    raise SystemExit(main())
