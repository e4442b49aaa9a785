"""JSON from elsewhere: equal to the standard reader's values, or a ValueError; never a RecursionError."""

import json

import pytest

from headrace.core.json_text import MAX_DEPTH, parse_json
from headrace.core.tensor_file import read_note


@pytest.mark.parametrize(
    "text", ['{"a": [1, 2.5, null, true, "ä\\u00e4\\ud83d\\ude00"]}', "3", '""', "[" * 64 + "]" * 64]
)
def test_values_are_those_of_the_standard_reader(text):
    assert parse_json(text) == parse_json(text.encode()) == json.loads(text)


@pytest.mark.parametrize(
    "text",
    [
        "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1),
        "[" * 200_000,
        '{"a":' * 200_000,
        "[" * 900 + "]" * 900,
        '"\\ud800"',
        '{"\\udc00": 1}',
        "9" * 5000,
        "",
        "{",
        b"\xff\xfe\x00",
    ],
    ids=lambda text: repr(text[:12]),
)
def test_all_else_is_a_value_error(text):
    with pytest.raises(ValueError):  # noqa: PT011 - the standard reader's messages vary
        parse_json(text)


def test_size_is_bounded():
    with pytest.raises(ValueError, match="more than 10"):
        parse_json("[" + " " * 20 + "]", 10)


def test_a_note_that_headrace_did_not_write(tmp_path):
    path = tmp_path / "x.safetensors"

    def write(texts: str) -> None:
        header = f'{{"__metadata__": {texts}}}'.encode()
        path.write_bytes(len(header).to_bytes(8, "little") + header)

    for texts in ('["headrace"]', "null", '{"format": "pt"}'):
        write(texts)
        assert read_note(path) == {}
    for texts in ('{"headrace": 5}', '{"headrace": ["x"]}', '{"headrace": "[]"}'):
        write(texts)
        with pytest.raises(ValueError, match="note 'headrace' is not a mapping"):
            read_note(path)
