"""The probability of each label from which on it is answered, as the run's validation found it best."""

from headrace.core.errors import ConfigError
from headrace.report.run_files import read_mapping
from headrace.telemetry.validation_report import report_file
from headrace.weights.weights import Weights


def tuned_thresholds(weights: Weights) -> list[float]:
    """Return the thresholds that the validation of exactly these weights recorded; 0.5 of a label without images."""
    run = weights.path.parent.parent if weights.path else None
    report = read_mapping(report_file(run, weights.step)).get(weights.label) if run else None
    rows = report.get("classes") if isinstance(report, dict) else None
    names = [row.get("name") for row in rows] if isinstance(rows, list) else None
    if not rows or names != list(weights.class_names):
        raise ConfigError(
            f"No validation of exactly these weights ({weights.origin}, {weights.label}) is recorded.",
            rule="Thresholds are those with the best F1 of each label on the validation images of the run.",
            remedy="Name the run, or give a number: --threshold 0.3.",
        )
    return [0.5 if row.get("threshold") is None else float(row["threshold"]) for row in rows]
