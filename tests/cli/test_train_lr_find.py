"""`headrace lr-find`: the suggestion, the plot, and that nothing else is written."""

import xml.etree.ElementTree as ElementTree

from headrace.cli.main import main


def test_a_rate_is_suggested_and_plotted(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["lr-find", "--model", "toy_model_bn", "--steps", "60", "--highest", "5"]) == 0
    out = capsys.readouterr().out
    rate = out.split()[1].rstrip(",")
    assert 1e-5 < float(rate) < 5
    assert out.splitlines()[-1] == f"next        headrace train --model toy_model_bn --lr {rate}"
    assert "\ntrain       0.071, chosen: " in out
    assert [path.name for path in tmp_path.iterdir()] == ["lr-find.svg"]
    assert ElementTree.parse("lr-find.svg").getroot().tag.endswith("svg")
    assert main(["lr-find", "--steps", "2"]) == 2
    assert main(["lr-find", "--plot", "nowhere/lr.svg"]) == 2
    assert "Cannot write nowhere/lr.svg: there is no directory nowhere." in capsys.readouterr().err
