"""What the compiled PTX of a kernel does: its instructions, all of them and those of one tile."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

# Matrix products, exponentials, memory; "all" is every instruction.
INSTRUCTIONS = {
    "all": r"",
    "mma": r"(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)",
    "exp2": r"ex2\.approx",
    "global loads": r"ld\.global",
    "global stores": r"st\.global",
    "shared loads": r"(?:ld\.shared|ldmatrix)",
    "shared stores": r"(?:st\.shared|stmatrix)",
    "shuffles": r"shfl\.sync",
    "barriers": r"bar(?:rier)?\.",
    "fp64": r"(?:fma|mul|add)\.(?:rn\.)?f64",
}
_LABEL = re.compile(r"(\$L__BB\w+):")
_INSTRUCTION = re.compile(r"\s+(?P<if>@!?%p\d+\s+)?(?P<code>[a-z][\w.:]*)(?:\s+(?P<to>\$L__BB\w+))?")


@dataclass
class Block:
    """Instructions that run one after the other, and the labels of what may follow them."""

    label: str
    code: list[str] = field(default_factory=list)
    next: list[str] = field(default_factory=list)


def count_instructions(ptx: str) -> dict[str, int]:
    """Instructions of a kernel as they stand in the code, whether they ever run or run often."""
    return count(code for block in read_blocks(ptx).values() for code in block.code)


def tile_instructions(ptx: str) -> dict[str, int]:
    """Instructions of a thread for one tile of a walk: the shortest way around the loop that computes its weights.

    The loop is the innermost one with an exponential. The way goes through its block with the most of them, and past
    what a tile rarely needs: rechecks of products near the threshold, a running maximum, values that are not finite.
    Loops inside it (the recheck, the search for a block that keeps a key) are not on the way.
    """
    blocks = read_blocks(ptx)
    loop: set[str] = set()
    inside = set(blocks)
    while found := [one for one in _loops(inside, blocks) if any(_exponentials(blocks[label]) for label in one)]:
        loop = max(found, key=len)
        entry = next(label for label in blocks if label in loop and _entered(label, loop, blocks))
        inside = loop - {entry}
    if not loop:
        raise ValueError("this kernel has no loop with an exponential")
    path_blocks = loop - set().union(*_loops(inside, blocks))
    weights = max(path_blocks, key=lambda label: _exponentials(blocks[label]))
    way = _shortest(weights, entry, path_blocks, blocks)
    if weights != entry:
        way = _shortest(entry, weights, path_blocks, blocks) + way
    return count(code for label in way for code in blocks[label].code)


def count(code: Iterable[str]) -> dict[str, int]:
    code = list(code)
    return {name: sum(bool(re.match(pattern, one)) for one in code) for name, pattern in INSTRUCTIONS.items()}


def read_blocks(ptx: str) -> dict[str, Block]:
    """The kernel's blocks in the order of the code; the first is where it begins."""
    block = Block("")
    blocks = {"": block}
    falls_through = True
    for line in ptx.splitlines():
        if label := _LABEL.match(line):
            following = Block(label[1])
        elif found := _INSTRUCTION.match(line):
            block.code.append(found["code"])
            if found["code"].startswith("bra"):
                block.next.append(found["to"])
            if not (found["code"].startswith("bra") or found["code"] == "ret"):
                continue
            falls_through = bool(found["if"])
            following = Block(f"after {len(blocks)}")
        else:
            continue
        if falls_through:
            block.next.append(following.label)
        blocks[following.label] = block = following
        falls_through = True
    live = {"", *_reachable("", set(blocks), blocks)}  # nothing leads to what stands behind an unconditional branch
    return {label: one for label, one in blocks.items() if label in live}


def _exponentials(block: Block) -> int:
    return count(block.code)["exp2"]


def _entered(label: str, loop: set[str], blocks: dict[str, Block]) -> bool:
    return any(label in block.next for block in blocks.values() if block.label not in loop)


def _reachable(start: str, within: set[str], blocks: dict[str, Block]) -> set[str]:
    """What comes after `start` on any way through these blocks; itself only if a way leads back."""
    found: set[str] = set()
    todo = [start]
    while todo:
        for label in blocks[todo.pop()].next:
            if label in within and label not in found:
                found.add(label)
                todo.append(label)
    return found


def _loops(within: set[str], blocks: dict[str, Block]) -> list[set[str]]:
    """The largest sets of blocks from each of which every other of the set can be reached."""
    after = {label: _reachable(label, within, blocks) for label in within}
    loops: list[set[str]] = []
    for label in within:
        if label in after[label] and not any(label in loop for loop in loops):
            loops.append({other for other in after[label] if label in after[other]})
    return loops


def _shortest(start: str, end: str, within: set[str], blocks: dict[str, Block]) -> list[str]:
    """The blocks from `start` up to, not including, `end` with the fewest instructions."""
    found = {start}  # a block is found first on the shortest way to it, since ways are taken by their length
    todo: list[tuple[int, list[str]]] = [(len(blocks[start].code), [start])]
    while todo:
        length, way = min(todo)
        todo.remove((length, way))
        for label in blocks[way[-1]].next:
            if label == end:
                return way
            if label in within and label not in found:
                found.add(label)
                todo.append((length + len(blocks[label].code), [*way, label]))
    raise ValueError(f"no way from {start} to {end}")
