"""`headrace configs` and the argv of the other commands."""

import pytest

from headrace.cli.configs import configs as main
from headrace.cli.options import parse, print_remarks, read_arguments
from headrace.core.errors import ConfigError


@pytest.fixture(autouse=True)
def no_data_directory(monkeypatch):
    for variable in ("DATASETS_DIR", "DATA_DIR"):
        monkeypatch.delenv(variable, raising=False)


@pytest.mark.reference
def test_list(capsys, tmp_path):
    assert main([]) == 0
    shipped = capsys.readouterr().out
    assert shipped.startswith("default ")
    assert "cifar10_resnet20" in shipped
    assert "ipus" not in shipped
    assert main(["--reference"]) == 0
    reference = capsys.readouterr().out
    assert "mk2_resnet50_gn_16ipus" in reference
    assert "cifar10_resnet20" not in reference
    assert main(["list"]) == 0
    assert capsys.readouterr().out == shipped
    (tmp_path / "mine.yml").write_text("# Mine.\nfirst: {}\n_hidden: {}\n")
    assert main(["--config-path", str(tmp_path / "mine.yml")]) == 0
    assert capsys.readouterr().out == "first  Mine.\n"


@pytest.mark.reference
@pytest.mark.parametrize(
    "argv",
    [
        ["show", "resnet8_test", "--seed", "3", "--all"],
        ["show", "--all", "--seed", "3", "resnet8_test"],
        ["show", "--config=resnet8_test", "--seed=3", "--all"],
    ],
)
def test_show(capsys, argv):
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert out.startswith("resnet8_test:\n")
    lines = {line.split(":")[0].strip(): line for line in out.splitlines()}
    assert lines["seed"].split() == ["seed:", "3", "#", "command", "line"]
    assert lines["# shuffle"].split() == ["#", "shuffle:", "true", "#", "default"]
    assert "# recipe reference_tf2.yml:" in lines["micro_batch_size"]


def test_show_tells_what_was_let_go(capsys):
    assert main(["show", "default", "--optimizer", "adamw"]) == 0
    assert "note: optimizer_params" in capsys.readouterr().err


WRONG = ("sho", "show defalt", "show a b", "options x", "show --bla 1", "--reference --config-path x")


@pytest.mark.parametrize("line", WRONG)
def test_wrong_words(line: str):
    with pytest.raises(ConfigError):
        main(line.split())


@pytest.mark.reference
def test_parse_gives_the_configuration_and_the_commands_own():
    resolved, own = parse(
        ["--config", "resnet8_test", "--epochs=3", "--json", "here", "--no-shuffle"],
        "headrace test",
        lambda parser: (parser.add_argument("place"), parser.add_argument("--json", action="store_true")),
    )
    assert resolved.name == "resnet8_test"
    assert resolved.config.batch.num_epochs == 3
    assert resolved.config.data.shuffle is False
    assert (own.place, own.json) == ("here", True)


def test_parse_reads_the_users_file(tmp_path):
    (tmp_path / "mine.yml").write_text("a: {seed: 4}\n")
    resolved, _ = parse(["--config_path", str(tmp_path / "mine.yml"), "--config", "a"], "headrace test")
    assert resolved.config.run.seed == 4


def test_words_are_options_over_a_saved_run():
    def extra(parser):
        parser.add_argument("run_dir", metavar="RUN_DIR")

    words = read_arguments(["runs/x", "--num-replicas", "2"], "headrace resume", extra)
    assert (words.args.run_dir, words.options) == ("runs/x", {"num_replicas": "2"})
    with pytest.raises(ConfigError, match="RUN_DIR"):
        read_arguments([], "headrace resume", extra)


def test_remarks_go_to_stderr(capsys):
    resolved, _ = parse(["--num-epochs", "1", "--warmup-epochs", "2"], "headrace test")
    print_remarks(resolved)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("warning: The warm-up is not over")
