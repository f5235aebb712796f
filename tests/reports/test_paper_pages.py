"""Laptop tables put into pages."""

from __future__ import annotations

import pytest

from traformer.reports.paper_pages import digest, filled, main

TITLES = {
    "flip_flop": ("flip_flop, sparse", ("2048",)),
    "induction": ("induction", ("51-100", "251-300")),
    "copy": ("copy_unique", ("51-100", "151-200", "251-300")),
}


@pytest.fixture
def results(tmp_path):
    for table, (title, lengths) in TITLES.items():
        head = f"| {title}: exact match | {' | '.join(lengths)} | seeds | sequences |"
        rows = [
            "| tra |" + " 40 % (1–60) |" * len(lengths) + " 4 | 512 |",
            "| rope |" + " 7 % |" * len(lengths) + " 2 | 512 |",
            "| chance |" + " 3 % |" * len(lengths) + "  |  |",
        ]
        if table == "copy":
            rows.insert(0, "| fire |" + " 90 % |" * len(lengths) + " 1 | 512 |")
        (tmp_path / table).mkdir()
        text = "\n".join([head, "| --- " * (len(lengths) + 3) + "|", *rows]) + "\n"
        (tmp_path / table / "table.md").write_text(text, encoding="utf-8")
    return tmp_path


def test_the_digest_has_a_row_for_each_method_the_best_copier_first(results):
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in digest(results).splitlines()[2:]]
    assert [row[0] for row in rows] == ["`fire`", "`tra`", "`rope`", "chance"]
    assert rows[0][1:] == ["", "", "", "90 %", "90 %", "90 %", "–, –, 1"]
    assert rows[1][1:] == ["40 % (1–60)"] * 6 + ["4, 4, 4"]
    assert rows[3][-1] == ""


def test_pages_are_filled_between_their_marks_and_nowhere_else(results):
    (results / "induction" / "overview.md").write_text("short\n", encoding="utf-8")
    copy, induction, end = "<!-- laptop: copy -->\n", "<!-- laptop: induction -->\n", "<!-- end -->\n"
    text = filled(f"a\n{copy}old\n{end}b\n{induction}{end}{end}", results)
    table = (results / "copy" / "table.md").read_text(encoding="utf-8")
    assert text == f"a\n{copy}{table}{end}b\n{induction}short\n{end}{end}"
    assert filled(text, results) == text


def test_the_command_says_what_is_missing(results, tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text("<!-- laptop: text -->\n<!-- end -->\n", encoding="utf-8")
    assert main([str(results), str(page)]) == 2 and "there is no" in capsys.readouterr().err
    assert main([str(results)]) == 2 and "usage" in capsys.readouterr().err
    assert page.read_text(encoding="utf-8") == "<!-- laptop: text -->\n<!-- end -->\n"
