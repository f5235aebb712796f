"""The paper's tables as sweeps, at three scales, for `tra reproduce`. Loads without torch.

`smoke`   seconds: that every part of a table works. Its numbers mean nothing, so nothing is concluded from them.
`laptop`  the paper's lengths with a small model and few steps; the budget of each table is in docs/paper_tables.md.
`paper`   the published settings: mini, 25,000 steps of 64 flip-flops, 31,250 steps of 128 for copy, induction and
          instructions, medium for text, four seeds. Rates that are not published (all but flip-flop's) are our choice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from traformer.errors import unknown_name
from traformer.experiments.configs import TEXT_PAPER, TEXT_SMALL
from traformer.methods import ABLATION, names_of_kind
from traformer.runs.config import RunConfig
from traformer.sweeps.cell import Cell
from traformer.tasks.algorithmic import PROBLEMS

SCALES = ("smoke", "laptop", "paper")
OURS = ("tra", "tra_plus")
# What copies farthest in copy_batch: a window of two keys marks each token's neighbour, TRA above it reads. It was
# added to the tables of strings and of induction after their first runs, and before any of its own.
STACK = "previous_token,tra_far"
# The same with FoT in TRA's place. In copy_recipe it copies nearly as far, so copy of unique symbols has it, too: added
# after the runs of STACK there, and before any of its own.
RIVAL_STACK = "previous_token,fot_far"
# tra_plus with exact marks: half of each layer's heads read the previous token. STACK reads far and does not learn
# letters, tra_plus the other way round. On one seed that no table has this learned both alphabets (results/choices.csv;
# nothing beyond the trained length was looked at). It and FoT with the same heads were added after all others.
EXACT, RIVAL_EXACT = "tra_previous", "fot_previous"
JUDGED = (*OURS, STACK, EXACT)  # whose claims a table ends with

_NO_DROPOUT = {
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}  # torch's fused kernel has none on a CPU
_SMOKE = RunConfig(
    preset="tiny", steps=2, batch_size=4, lr=1e-3, log_every=1, save_every=2, keep=1, threads=1,
    model_options={"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, **_NO_DROPOUT},
)  # fmt: skip
# Short examples first, for every method: without it tra_plus does not learn to copy 50 symbols in 1,000 steps. Rate and
# curriculum are those with which one run of tra_plus, with a seed that no table has, learned the trained lengths.
_LAPTOP = RunConfig(
    preset="tiny", lr=3e-3, curriculum=0.5, clip=1.0, log_every=50, save_every=250, keep=1, threads=1,
    model_options={"num_attention_heads": 4, "head_dim": 64, **_NO_DROPOUT},
)  # fmt: skip
# For all strings but induction's, which was run before this was known: on copy of 20 symbols the training loss after
# 1,500 steps was 17 times lower with this beta2 of AdamW than with 0.999 (copy_recipe).
_LAPTOP_STRINGS = _LAPTOP.replace(beta2=0.95)
_PAPER = RunConfig(preset="mini", lr=1e-4, log_every=100, save_every=1000)


@dataclass(frozen=True)
class Part:
    """Runs of one task and size: the methods with their number of seeds, and the lengths they are measured at."""

    name: str
    config: RunConfig
    lengths: str
    examples: int
    methods: dict[str, int]

    def cells(self, seeds: int | None = None) -> list[Cell]:
        """Seed by seed, so that an interrupted table has whole columns. `seeds` takes the place of every number."""
        most = seeds or max(self.methods.values())
        return [
            Cell(f"{self.name}-{method}-seed{seed}", self.config.replace(attention=method, seed=seed), self.lengths,
                 self.examples)
            for seed in range(most)
            for method, own in self.methods.items()
            if seed < (seeds or own)
        ]  # fmt: skip


@dataclass(frozen=True)
class PaperTable:
    """One table: what it shows, and its parts at a scale."""

    title: str
    parts: Callable[[str], list[Part]]


def _of(scale: str, smoke: Part, laptop: Part, paper: Part) -> Part:
    return {"smoke": smoke, "laptop": laptop, "paper": paper}[scale]


def _seeds(count: int, *methods: str) -> dict[str, int]:
    return dict.fromkeys(methods, count)


def flip_flop(scale: str) -> list[Part]:
    options = {"length": 512}
    smoke = Part(
        "flip_flop", _SMOKE.replace(task="flip_flop", task_options={"length": 8}), "8,32", 4, _seeds(1, "tra", "rope")
    )
    laptop = Part(
        "flip_flop",
        _LAPTOP.replace(
            task="flip_flop",
            task_options=options,
            preset="mini",
            model_options=_NO_DROPOUT,
            batch_size=8,
            steps=400,
            lr=1e-3,
            curriculum=0.0,
        ),
        "512,2048",
        2048,
        {**_seeds(4, *OURS), "rope": 2, EXACT: 4},
    )
    paper = Part(
        "flip_flop",
        _PAPER.replace(task="flip_flop", task_options=options, batch_size=64, steps=25_000),
        "512,1024,2048",
        2048,
        _seeds(4, *OURS, "rope", "alibi", "cope", "fot", EXACT),
    )
    return [_of(scale, smoke, laptop, paper)]


_PEERS = ("fire", "alibi", "cope", "fot", "asentmax")
_TO_300 = "1-50,51-100,101-150,151-200,201-250,251-300"
_LONG = {"batch_size": 128, "steps": 31_250}  # 4 million examples


def copy(scale: str) -> list[Part]:
    parts = []
    for alphabet in ("unique", "letters"):
        name = f"copy_{alphabet}"
        options = {"alphabet": alphabet, "max_length": 50}
        few = {"alphabet": alphabet, "max_length": 3, **({"vocabulary": 12} if alphabet == "unique" else {})}
        everyone = {**_seeds(4, *OURS, "rope"), **_seeds(2, *_PEERS)}
        smoke = Part(name, _SMOKE.replace(task="copy", task_options=few), "3,12", 4, _seeds(1, "tra", "rope"))
        laptop = Part(
            name,
            _LAPTOP_STRINGS.replace(task="copy", task_options=options, batch_size=64, steps=1500),
            _TO_300,
            512,
            {**everyone, **_seeds(4, STACK, RIVAL_STACK, EXACT, RIVAL_EXACT)}
            if alphabet == "unique"
            else _seeds(2, *OURS, "rope", STACK, EXACT, RIVAL_EXACT),
        )
        paper = Part(
            name,
            _PAPER.replace(task="copy", task_options=options, **_LONG),
            _TO_300,
            2048,
            _seeds(4, *everyone, STACK, RIVAL_STACK, EXACT, RIVAL_EXACT),
        )
        parts.append(_of(scale, smoke, laptop, paper))
    return parts


def induction(scale: str) -> list[Part]:
    options = {"max_length": 50, "symbols": 64}
    lengths = _TO_300.replace("1-50", "2-50", 1)
    everyone = {**_seeds(4, *OURS, "rope"), **_seeds(2, *_PEERS)}
    smoke = Part(
        "induction",
        _SMOKE.replace(task="induction", task_options={"max_length": 4, "symbols": 8}),
        "4,16",
        4,
        _seeds(1, "tra", "rope"),
    )
    laptop = Part(
        "induction",
        _LAPTOP.replace(task="induction", task_options=options, batch_size=64, steps=1500),
        lengths,
        512,
        {**everyone, **_seeds(4, STACK, EXACT), RIVAL_EXACT: 2},
    )
    paper = Part(
        "induction",
        _PAPER.replace(task="induction", task_options=options, **_LONG),
        lengths,
        2048,
        _seeds(4, *everyone, STACK, EXACT, RIVAL_EXACT),
    )
    return [_of(scale, smoke, laptop, paper)]


_TO_500 = ",".join(f"{low}-{low + 49}" for low in range(51, 500, 50))


def instructions(scale: str) -> list[Part]:
    methods = (*OURS, "rope", "lstm")
    smoke = Part("instructions", _SMOKE.replace(task="instructions", task_options={"max_length": 4}), "4,16", 8,
                 _seeds(1, "tra", "rope"))  # fmt: skip
    options = {"max_length": 50}
    laptop = Part(
        "instructions",
        _LAPTOP_STRINGS.replace(task="instructions", task_options=options, batch_size=64, steps=2000),
        f"0-50,{_TO_500}",
        512,
        _seeds(2, *methods, STACK, EXACT, RIVAL_EXACT),
    )
    paper = Part(
        "instructions",
        _PAPER.replace(task="instructions", task_options=options, **_LONG),
        f"0-50,{_TO_500}",
        2048,
        _seeds(4, *methods, STACK, EXACT, RIVAL_EXACT),
    )
    return [_of(scale, smoke, laptop, paper)]


def algorithmic(scale: str) -> list[Part]:
    """Not in the paper: the usual problems of the literature, trained to 50."""
    methods = (*OURS, "rope", "lstm")
    parts = []
    for problem in PROBLEMS:
        options = {"problem": problem, "max_length": 50}
        smoke = Part(
            problem,
            _SMOKE.replace(task="algorithmic", task_options={"problem": problem, "max_length": 4}),
            "4,16",
            4,
            _seeds(1, "tra"),
        )
        laptop = Part(
            problem,
            _LAPTOP_STRINGS.replace(task="algorithmic", task_options=options, batch_size=64, steps=1500),
            f"1-50,{_TO_500}",
            512,
            _seeds(1, *methods),
        )
        paper = Part(
            problem,
            _PAPER.replace(task="algorithmic", task_options=options, **_LONG),
            f"1-50,{_TO_500}",
            2048,
            _seeds(4, *methods),
        )
        parts.append(_of(scale, smoke, laptop, paper))
    return parts


def text(scale: str) -> list[Part]:
    smoke = Part(
        "text",
        _SMOKE.replace(task="text", task_options={"data": ["python-stdlib"], "length": 16}),
        "16,64",
        1,
        _seeds(1, "tra", "rope"),
    )
    laptop = Part(
        "text",
        TEXT_SMALL.replace(threads=1),
        "128,256,512,1024,2048,4096",
        64,
        _seeds(2, *OURS, "rope", "alibi", "nope", "fot"),
    )
    paper = Part(
        "text", TEXT_PAPER, "128,256,512,1024,2048,4096", 256, _seeds(4, *OURS, "rope", "alibi", "nope", "fot")
    )
    return [_of(scale, smoke, laptop, paper)]


def ablations(scale: str) -> list[Part]:
    """TRA with one part exchanged, on the tasks of the first two tables."""
    methods = ("tra", *names_of_kind(ABLATION))
    flip, unique = flip_flop(scale)[0], copy(scale)[0]
    if scale == "smoke":
        methods = ("tra", "tra_threshold_only")
    seeds = {"smoke": 1, "laptop": 2, "paper": 4}[scale]
    return [
        Part(f"ablations_{part.name}", part.config, part.lengths, part.examples, _seeds(seeds, *methods))
        for part in (flip, unique)
    ]


TABLES: dict[str, PaperTable] = {
    "flip_flop": PaperTable("Flip-flop of 512 tokens, to 2,048", flip_flop),
    "copy": PaperTable("Copy, trained to 50 symbols, tested to 300", copy),
    "induction": PaperTable("Induction over 64 symbols, trained to 50, tested to 300", induction),
    "instructions": PaperTable("Instructions, trained to 50 symbols, tested to 500", instructions),
    "algorithmic": PaperTable("Algorithmic tasks, trained to 50 symbols, tested to 500", algorithmic),
    "text": PaperTable("Text, trained at a window of 128, read to 4,096", text),
    "ablations": PaperTable("TRA with one part exchanged, on flip-flop and copy", ablations),
}
COST = "cost"  # a table without runs: the time of a training step over RoPE's
TABLE_NAMES = (*TABLES, COST)


def parts_of(table: str, scale: str) -> list[Part]:
    if table not in TABLES:
        raise unknown_name("table", table, TABLE_NAMES)
    if scale not in SCALES:
        raise unknown_name("scale", scale, SCALES)
    return TABLES[table].parts(scale)
