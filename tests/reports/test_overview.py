"""Figures from the counts of an experiment."""

from __future__ import annotations

from pathlib import Path

import pytest

from traformer.reports.farthest import farthest
from traformer.reports.overview import headline, main, pictures, read_figures

HEAD = "setting,arm,split,length,seed,right,examples,chance\n"


def cells(folder: Path, arms: dict[str, list[int]], seeds: int = 2, split: str = "test") -> Path:
    """Each arm's right answers of 100 at lengths 6, 12 and 24, the same for every seed."""
    rows = [
        f"copy,{arm},{split},{6 * 2**place},{seed},{right},100,0.01\n"
        for arm, values in arms.items()
        for seed in range(seeds)
        for place, right in enumerate(values)
    ]
    folder.mkdir(exist_ok=True)
    (folder / "cells.csv").write_text(HEAD + "".join(rows), encoding="utf-8")
    return folder


PEERS = {"rope": [100, 0, 0], "alibi": [100, 9, 0], "fot": [100, 80, 50], "nope": [90, 1, 0], "cope": [90, 70, 5]}


def test_the_headline_has_the_family_and_the_best_peers(tmp_path: Path) -> None:
    arms = {"no_removal": [99, 10, 0], "tra": [60, 20, 0], "tra_plus": [100, 99, 80], **PEERS}
    figures = read_figures(cells(tmp_path, arms) / "cells.csv")
    (first,) = headline(figures)
    assert [series.attention for series in first.series] == ["tra_plus", "tra", "fot", "cope", "alibi", "rope"]
    assert first.edge == 6 and first.series[0].points[2].value == 0.8


def test_a_task_without_peers_waits_where_another_has_them(tmp_path: Path) -> None:
    file = cells(tmp_path, {"tra_plus": [100, 99, 80], "rope": [100, 0, 0]}) / "cells.csv"
    with open(file, "a", encoding="utf-8") as lines:
        lines.writelines(
            f"flip_flop,tra_plus,sparse,{length},{seed},9,10,0.5\n" for length in (6, 12) for seed in (0, 1)
        )
    figures = read_figures(file)
    assert len(figures) == 2 and [figure.task for figure in headline(figures)] == ["copy"]


def test_the_demo_far_beyond_training() -> None:
    """From the committed results: TRA right at every length, RoPE near chance, every point with its count."""
    figure = farthest(Path(__file__).parents[2] / "results")
    assert figure is not None and figure.edge == 64
    tra, rope = figure.series
    assert [point.value for point in tra.points] == [1.0] * len(tra.points) and tra.points[-1].x == 1 << 20
    assert rope.points[-1].x == 4096 and rope.points[-1].value == pytest.approx(1 - 114 / 226)
    assert {point.chance for point in [*tra.points, *rope.points]} == {0.5}
    assert "RoPE ran out of time at 16,384" in figure.x_label
    assert farthest(Path("nowhere")) is None


def test_without_peers_it_has_the_parts(tmp_path: Path) -> None:
    figures = read_figures(cells(tmp_path, {"tra_plus": [100, 99, 80], "no_removal": [99, 10, 0]}) / "cells.csv")
    (first,) = headline(figures)
    assert [series.label for series in first.series] == ["tra_plus", "tra_plus_no_removal"]


def test_an_arm_with_seeds_missing_waits(tmp_path: Path) -> None:
    folder = cells(tmp_path, {"tra_plus": [100, 99, 80], "rope": [100, 0, 0]})
    with open(folder / "cells.csv", "a", encoding="utf-8") as file:
        file.write("copy,fot,test,6,0,100,100,0.01\n")
    assert [series.attention for series in read_figures(folder / "cells.csv")[0].series] == ["tra_plus", "rope"]


def test_mean_and_spread_over_seeds(tmp_path: Path) -> None:
    (tmp_path / "cells.csv").write_text(HEAD + "copy,tra,test,6,0,50,100,\ncopy,tra,test,6,1,100,100,\n")
    (point,) = read_figures(tmp_path / "cells.csv")[0].series[0].points
    assert (point.value, point.low, point.high, point.seeds, point.chance) == (0.75, 0.5, 1.0, 2, None)


def test_many_arms_get_a_panel_each_and_files_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = cells(
        tmp_path, {"tra_plus": [100, 99, 80], "tra": [60, 20, 0], **PEERS, "t5": [9, 9, 9], "fire": [8, 8, 8]}
    )
    assert main([str(folder)]) == 0
    assert {path.name for path in folder.iterdir()} == {
        "cells.csv", "headline.svg", "headline.png", "copy-test.svg", "copy-test.png"
    }  # fmt: skip
    whole = pictures(folder)["copy-test"]
    assert "the best first" in whole and all(name in whole for name in ("tra_plus", "RoPE", "FIRE"))
    assert "chance" in pictures(folder)["headline"]
    assert "prefers-color-scheme:dark" in (folder / "headline.svg").read_text(encoding="utf-8")
    assert "headline.svg" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, "No such file"),
        ("a,b\n1,2\n", "no column 'setting'"),
        (HEAD, "has no rows"),
        (HEAD + "copy,tra,test,six,0,50,100,\n", "holds something else than counts"),
        (HEAD + "copy,tra,test\n", "holds something else than counts"),
    ],
)
def test_what_cannot_be_drawn_is_one_sentence(
    text: str | None, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        (tmp_path / "cells.csv").write_text(text, encoding="utf-8")
    assert main([str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("tra: error: ") and sentence in said and said.count("\n") == 1
