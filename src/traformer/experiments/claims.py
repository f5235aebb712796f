"""The paper's two claims about length, defined once. Loads without torch.

*Stays right on sequences more than 3 times longer*: the reach of a method is the longest tested length up to which its
mean accuracy over seeds is at least LEVEL at every tested length; the claim holds if reach / trained length exceeds
LONGER.

*Cuts the error by more than 60 %*: at every tested length beyond the trained one, 1 - e / e' exceeds CUT, where e is
the mean error over seeds of the method and e' that of the best other method at that length. A length at which the best
other method makes no error has nothing to cut: it is left out, unless the method itself errs there, which cuts nothing.

Where peers that the paper does not compare with were run as well, the claim is judged a second time against the paper's
own, PAPER_PEERS, alone.

*Every seed*: our own targets for some tables; the worst seed at the worst length decides.

*Error per read*: of flip-flop, over all seeds together; it holds if the upper 95 % bound is below READ_ERROR, does not
hold if the share itself is not, and is not decided in between.

Accuracy is exact match. A length that is a range (51-100) counts as its upper end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from traformer.experiments.protocol import FAILS, HOLDS, UNDECIDED, Verdict, percent, together
from traformer.tasks.metrics import upper_bound

LONGER = 3.0
LEVEL = 0.95
CUT = 0.60
READ_ERROR = 1e-4
PAPER_PEERS = ("rope", "alibi", "cope", "fot")
NOT_TESTED = "not tested at this scale"

Accuracies = Mapping[int, float]  # length -> mean accuracy over seeds


def reach(accuracies: Accuracies) -> int:
    """The longest tested length up to which every accuracy is at least LEVEL; 0 if the shortest is not."""
    reached = 0
    for length in sorted(accuracies):
        if accuracies[length] < LEVEL:
            break
        reached = length
    return reached


def more_than_three_times_longer(name: str, method: str, accuracies: Accuracies, trained: int) -> Verdict:
    longest = max(accuracies)
    reached = reach(accuracies)
    claim = f"{method} stays right on sequences more than {LONGER:g} times longer"
    numbers = f"{percent(LEVEL)} or more to {reached / trained:.3g}x of {longest / trained:.3g}x tested"
    if longest <= LONGER * trained:
        return Verdict(name, claim, NOT_TESTED, f"tested to {longest / trained:.3g}x")
    return Verdict(name, claim, HOLDS if reached > LONGER * trained else FAILS, numbers)


def error_cut(own: Accuracies, others: Mapping[str, Accuracies], trained: int) -> dict[int, tuple[float, str]]:
    """length beyond the trained one -> (share of the best other method's error that is cut, that method)."""
    cuts = {}
    for length in sorted(own):
        known = {name: values[length] for name, values in others.items() if length in values}
        if length <= trained or not known:
            continue
        best = max(known, key=lambda name: known[name])
        if known[best] < 1.0:
            cuts[length] = (1 - (1 - own[length]) / (1 - known[best]), best)
        elif own[length] < 1.0:
            cuts[length] = (0.0, best)
    return cuts


def error_cut_by_sixty_percent(
    name: str,
    method: str,
    own: Accuracies,
    others: Mapping[str, Accuracies],
    trained: int,
    rivals: str = "the best other method",
) -> Verdict:
    claim = f"{method} cuts the error of {rivals} by more than {100 * CUT:g} % at every longer length"
    cuts = error_cut(own, others, trained)
    if not cuts:
        reason = "no other method was measured" if not others else "the best other method makes no error"
        return Verdict(name, claim, NOT_TESTED, reason)
    # What rounds to nothing is called so: records keep seven digits of a share, so equal ones may differ by a hair.
    shown = {length: f"{100 * cut:.0f} %" if cut >= 0.005 else "none" for length, (cut, _) in cuts.items()}
    numbers = ", ".join(f"{shown[length]} at {length} ({other})" for length, (_, other) in cuts.items())
    return Verdict(name, claim, HOLDS if all(cut > CUT for cut, _ in cuts.values()) else FAILS, numbers)


def error_of_paper_peers_cut(
    name: str, method: str, own: Accuracies, others: Mapping[str, Accuracies], trained: int
) -> Verdict | None:
    """The same against PAPER_PEERS alone; None where that is the same question, or none of them was run."""
    published = {other: values for other, values in others.items() if other in PAPER_PEERS}
    if not published or len(published) == len(others):
        return None
    rivals = f"the best of the paper's peers that were run ({', '.join(published)})"
    return error_cut_by_sixty_percent(name, method, own, published, trained, rivals)


@dataclass(frozen=True)
class Target:
    """What every seed of some methods should reach at every tested length from `shortest` on."""

    methods: tuple[str, ...]
    level: float
    shortest: int = 0  # upper end of the shortest length that counts


TARGETS = {  # by part of a table
    "flip_flop": Target(("tra", "tra_plus", "tra_previous"), 1.0),
    "induction": Target(("tra_plus", "tra_previous"), 0.99),
    "copy_unique": Target(("tra_plus", "previous_token,tra_far", "tra_previous"), 0.95, 300),
}


def every_seed(name: str, method: str, worst: Accuracies, target: Target) -> Verdict:
    """`worst`: length -> accuracy of the worst seed."""
    where = "at every length" if not target.shortest else f"from {target.shortest} on"
    claim = f"every seed of {method} reaches {percent(target.level)} {where}"
    counted = {length: value for length, value in worst.items() if length >= target.shortest}
    if not counted:
        return Verdict(name, claim, NOT_TESTED, f"tested to {max(worst)}")
    at = min(counted, key=lambda length: counted[length])
    return Verdict(
        name, claim, HOLDS if counted[at] >= target.level else FAILS, f"at worst {percent(counted[at])} at {at}"
    )


def error_per_read(name: str, method: str, reads: Mapping[int, tuple[int, int]]) -> Verdict:
    """`reads`: length -> wrong reads and all reads, of all seeds together."""
    outcomes, numbers = [], []
    for length, (wrong, total) in sorted(reads.items()):
        bound = upper_bound(wrong, total)
        outcomes.append(HOLDS if bound < READ_ERROR else FAILS if wrong / total >= READ_ERROR else UNDECIDED)
        numbers.append(f"{wrong:,} of {total:,} wrong at {length}, a share of at most {bound:.1e}")
    claim = f"{method} errs on fewer than one read in {1 / READ_ERROR:,.0f}"
    return Verdict(name, claim, together(outcomes), "; ".join(numbers))
