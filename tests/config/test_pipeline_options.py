"""The section `pipeline`: spellings of older programs, lists of numbers, and what goes together across sources."""

from pathlib import Path

import pytest

from headrace.config.command_line import build_parser, take_options
from headrace.config.load import Resolved, config_from, resolve
from headrace.config.schema import PipelineSection
from headrace.core.errors import ConfigError


def resolved(line: str, name: str = "none", path: Path | None = None) -> Resolved:
    options, left = take_options(line.split(), build_parser("headrace test"))
    assert left == []
    return resolve(options, name, str(path) if path else None, environ={})


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("", PipelineSection()),
        ("--pipeline-splits a b --num-replicas 2", PipelineSection(pipeline_splits=("a", "b"))),
        ("--pipeline-split a --pipeline-num 3", PipelineSection(pipeline_splits=("a",))),
        ("--pipeline_splits=3", PipelineSection(pipeline_splits=("3",))),
        ("--pipeline-splits", PipelineSection()),
        (
            "--pipeline-schedule GROUPED --device-mapping 0 1 1 0 --num-pipeline-stages 4",
            PipelineSection(pipeline_schedule="Grouped", device_mapping=(0, 1, 1, 0), num_pipeline_stages=4),
        ),
        ("--pipeline-sch sequential", PipelineSection(pipeline_schedule="Sequential")),
        ("--recomputation True --num-pip 2", PipelineSection(recomputation=True, num_pipeline_stages=2)),
        ("--enable-recompute --num-pip 2", PipelineSection(recomputation=True, num_pipeline_stages=2)),
        ("--enable-recomputation yes --num-pip 2", PipelineSection(recomputation=True, num_pipeline_stages=2)),
        (
            "--xla-recompute --num-pip 2 --strict",
            PipelineSection(recomputation=True, num_pipeline_stages=2, strict_pipeline=True),
        ),
        ("--no-recomputation", PipelineSection()),
    ],
)
def test_spellings(line, wanted):
    assert resolved(line).config.pipeline == wanted


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("--pipeline-s 3", "could be several options"),
        ("--pipeline-schedule zigzag", "Possible: Grouped, Interleaved, Sequential, GPipe, ZeroBubble"),
        ("--device-mapping 0 x --num-pipeline-stages 2", "not a list of whole numbers"),
        ("--device-mapping 0 1.5 --num-pipeline-stages 2", "not a list of whole numbers"),
        ("--num-pipeline-stages 0", "must be 1 or more"),
        ("--pipeline-splits a --num-pipeline-stages 1", "makes 2 stages, but num_pipeline_stages 1 (command line)"),
    ],
)
def test_refusals(line, told):
    with pytest.raises(ConfigError) as caught:
        resolved(line)
    assert told in str(caught.value) + caught.value.remedy


@pytest.mark.parametrize("raw", [[0, 1, 1], (0, 1, 1), ["0", "1", "1"], "0 1 1", "0, 1, 1"])
def test_numbers_in_all_forms(raw):
    config = config_from({"device_mapping": raw, "num_pipeline_stages": 3})
    assert config.pipeline.device_mapping == (0, 1, 1)


@pytest.mark.parametrize(
    ("options", "stages", "cut"),
    [
        ({}, 1, 1),
        ({"num_pipeline_stages": 3}, 3, 3),
        ({"pipeline_splits": ["3"]}, 4, 4),
        ({"pipeline_splits": 0}, 1, 1),
        ({"pipeline_splits": ["a", "b"]}, 3, ("a", "b")),
        ({"pipeline_splits": ["3", "4"]}, 3, ("3", "4")),
        ({"pipeline_splits": ["a", "b"], "num_pipeline_stages": 3}, 3, ("a", "b")),
    ],
)
def test_the_number_of_stages_and_the_cut(options, stages, cut):
    pipeline = config_from(options).pipeline
    assert (pipeline.num_stages, pipeline.cut) == (stages, cut)


FOUR = """four:
  pipeline-splits: [a, b, c]
  device-mapping: 0 0 0 0
  recomputation: true
"""


@pytest.mark.parametrize(
    ("line", "wanted", "num_notes"),
    [
        ("", (("a", "b", "c"), 1, (0, 0, 0, 0), True), 0),
        ("--pipeline-splits d e f", (("d", "e", "f"), 1, (0, 0, 0, 0), True), 0),
        ("--pipeline-splits d", (("d",), 1, (), True), 1),
        ("--num-pipeline-stages 4", (("a", "b", "c"), 4, (0, 0, 0, 0), True), 0),
        ("--num-pipeline-stages 2", ((), 2, (), True), 2),
        ("--num-pipeline-stages 1", ((), 1, (), True), 2),
        ("--pipeline-splits", ((), 1, (), True), 1),
    ],
)
def test_what_a_file_says_of_stages_goes_when_the_command_line_changes_their_number(tmp_path, line, wanted, num_notes):
    path = tmp_path / "mine.yml"
    path.write_text(FOUR)
    got = resolved(line, "four", path)
    pipeline = got.config.pipeline
    found = (pipeline.pipeline_splits, pipeline.num_pipeline_stages, pipeline.device_mapping, pipeline.recomputation)
    assert found == wanted
    assert len(got.notes) == num_notes
