"""What makes `tra_plus` work: its parts left out one by one, and its peers, under the protocol of `protocol.py`.

Flip-flop 32 -> 256 and unique copy 6 -> 48 in the decoder of `peers` (two layers of 64, four heads). Every arm has a
search over at least four rates on the training distribution, then five seeds that neither the search nor the design of
`tra_plus` has seen, 512 sequences for each length. One command, which can be stopped and given again:

    tra sweep what_works --out runs/what_works
    tra report runs/what_works --experiment what_works
    python -m traformer.experiments.summary what_works runs/what_works results/what_works
"""

from __future__ import annotations

from traformer.experiments import peers
from traformer.experiments.protocol import (
    Arm,
    AtLeast,
    Beats,
    Hypothesis,
    Place,
    Protocol,
    Setting,
    arms,
)

TITLE = "What makes tra_plus work: its parts left out, and its peers"

SETTINGS = {
    name: Setting(name, config.replace(log_every=50), lengths) for name, (config, lengths) in peers.TASKS.items()
}

# tra_plus with one part left out. Without removal there is nothing that a surrogate gradient could bring back: all keys
# are in the softmax, and distance counts those above the threshold.
PARTS = (
    Arm("no_removal", "tra_plus", {"removal": False, "straight_through": False}),
    Arm("no_surrogate", "tra_plus", {"straight_through": False}),
    Arm("own_key", "tra_plus", {"exclude_self": False}),
    Arm("one_gate", "tra_plus", {"gate_bias": None}),
    Arm("no_temperature", "tra_plus", {"temperature": False}),
)
DECISIVE = (*arms("tra_plus"), *PARTS)
EQUAL = arms("rope_equal", "fot_equal", "alibi_equal", "stick_breaking_equal")  # with what tra_plus gives its heads
FIRST_PEERS = arms("tra", "rope", "fot", "alibi", "stick_breaking")
OTHER_PEERS = arms("nope", "cope", "asentmax", "ssmax", "selective", "differential", "t5", "fire", "lstm")

COPY_4X, COPY_8X = Place("copy", "test", 24), Place("copy", "test", 48)
FLIP_FLOP_8X = tuple(Place("flip_flop", split, 256) for split in ("iid", "sparse", "dense"))
SPARSE_8X = FLIP_FLOP_8X[1]
_RIVALS = tuple(arm.name for arm in (*FIRST_PEERS, *OTHER_PEERS))
_EQUAL = tuple(arm.name for arm in EQUAL)

HYPOTHESES: tuple[Hypothesis, ...] = (
    AtLeast("W1", "tra_plus copies 90 % at 4 times the trained length", "tra_plus", (COPY_4X,), 0.9),
    *(
        Beats(name, f"copy at 4x: tra_plus is 10 points better than {what}", "tra_plus", (arm,), (COPY_4X,), 0.1)
        for name, arm, what in (
            ("W2", "no_removal", "the same heads, gates and temperature with all keys in the softmax"),
            ("W3", "no_surrogate", "without a gradient for removed keys"),
            ("W4", "own_key", "with the own key visible in all heads"),
            ("W5", "one_gate", "with all gates starting alike"),
            ("W6", "no_temperature", "without a temperature"),
        )
    ),
    Beats("W7", "copy at 4x: tra_plus is at least 10 points better than every peer as published", "tra_plus", _RIVALS,
          (COPY_4X,), 0.1),
    AtLeast("W8", "flip-flop at 8x: tra_plus has 99 % on all three densities", "tra_plus", FLIP_FLOP_8X, 0.99),
    Beats("W9", "sparse flip-flop at 8x: removal is worth at least 5 points", "tra_plus", ("no_removal",), (SPARSE_8X,),
          0.05),
    Beats("W10", "sparse flip-flop at 8x: tra_plus is 5 points or more better than every peer as published",
          "tra_plus", _RIVALS, (SPARSE_8X,), 0.05),
    # W11 and W12 were declared after W1 to W10 had begun to run, before any arm with the equal recipe did.
    Beats("W11", "copy at 4x: tra_plus is 10 points better than every peer with the equal recipe", "tra_plus", _EQUAL,
          (COPY_4X,), 0.1),
    Beats("W12", "sparse flip-flop at 8x: tra_plus is 5 points better than every peer with the equal recipe",
          "tra_plus", _EQUAL, (SPARSE_8X,), 0.05),
)  # fmt: skip

PROTOCOL = Protocol(
    settings=SETTINGS,
    waves=(
        ("copy", DECISIVE[:3]),
        ("copy", DECISIVE[3:]),
        ("copy", EQUAL[:2]),
        ("copy", FIRST_PEERS[:3]),
        ("flip_flop", DECISIVE[:3]),
        ("copy", EQUAL[2:]),
        ("flip_flop", EQUAL),
        ("copy", FIRST_PEERS[3:]),
        ("flip_flop", DECISIVE[3:]),
        ("copy", OTHER_PEERS),
        ("flip_flop", FIRST_PEERS),
        ("flip_flop", OTHER_PEERS),
    ),
    hypotheses=HYPOTHESES,
)


cells, next_cells, verdicts = PROTOCOL.cells, PROTOCOL.next_cells, PROTOCOL.verdicts
