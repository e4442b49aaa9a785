"""The report at the end of a run: written by default, not where it is turned off, and never a reason to fail."""

from headrace.run.fit import train
from headrace.telemetry.records import Note, RunEnd, read_records


def test_a_report_that_fails_or_is_off_leaves_the_run_as_it_is(quick, monkeypatch):
    def fail(path):
        raise OSError(28, "No space left on device", str(path))

    for name in ("write_curve", "write_run_report"):
        monkeypatch.setattr(f"headrace.run.recorder.{name}", fail)
    short = {"num_epochs": 1, "weight_updates_per_epoch": 1, "validation": False}
    result = train(quick(**short))
    assert result.outcome == "finished"
    records = read_records(result.directory)
    assert [record.outcome for record in records if isinstance(record, RunEnd)] == ["finished"]
    plot, report = [record for record in records[-2:] if isinstance(record, Note)]
    assert plot.text.startswith("no plot was written: ")
    assert "no report was written" in report.text
    monkeypatch.undo()
    result = train(quick(report=False, **short))
    assert result.outcome == "finished"
    assert not (result.directory / "report.html").exists()
    assert not any("no report" in record.text for record in read_records(result.directory) if isinstance(record, Note))
