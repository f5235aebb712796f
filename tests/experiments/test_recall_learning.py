"""The table of the learning trials is what their records say, and the page has it."""

from pathlib import Path

from traformer.experiments import recall_learning
from traformer.runs.folder import RunFolder
from traformer.runs.measurements import Measurement
from traformer.sweeps.records import read_records

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "results" / "recall_learning"


def test_the_table_is_that_of_the_records(tmp_path):
    cells = {cell.name: cell for cell in recall_learning.cells()}
    for name, record in read_records(KEPT / "records.jsonl").items():
        folder = RunFolder(tmp_path / name)
        folder.write_config(cells[name].config, {})
        folder.results.write(Measurement.from_row({**record["shared"], **row}) for row in record["results"])
    recall_learning.write_summary(tmp_path, tmp_path / "summary")
    table = (tmp_path / "summary" / "table.md").read_text(encoding="utf-8")
    assert table == (KEPT / "table.md").read_text(encoding="utf-8")
    assert table in (ROOT / "docs" / "evidence_recall.md").read_text(encoding="utf-8")
