"""Benchmarks: the arithmetic of rates and latencies, measured runs, named entries, refusals."""

import json
import re
import sys
import time
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from headrace.cli.bench import add_arguments
from headrace.cli.benchmark_file import SHIPPED, _print_table, read_entries
from headrace.cli.main import main
from headrace.cli.options import read_config_arguments, resolve_arguments
from headrace.config.load import config_from, resolve
from headrace.core.errors import ConfigError
from headrace.data.dataset import describe_dataset, open_dataset
from headrace.run import benchmarks, inference_bench
from headrace.run.benchmarks import bench, call_rates, latencies
from headrace.run.design import design_run
from headrace.run.inference_bench import bench_inference
from tests.fork_server import run
from tests.job.processes import run_job

SMALL = {"model_name": "cifar_resnet8", "dataset": "cifar10", "micro_batch_size": 4}


def test_rates_leave_the_first_call_out():
    rates = call_rates(100, [9.0, 1.0, 2.0, 4.0])
    assert rates.each == (100.0, 50.0, 25.0)
    assert rates.median == 50.0
    assert rates.mean == pytest.approx(np.mean([100, 50, 25]))
    assert rates.deviation == pytest.approx(np.std([100, 50, 25], ddof=1))
    assert call_rates(10, [1.0, 2.0]).deviation == 0


def test_latencies_are_percentiles_in_milliseconds():
    seconds = np.random.default_rng(0).permutation(np.arange(1, 201)) / 1e3
    found = latencies(seconds.tolist())
    assert (found["p50"], found["p90"], found["p95"], found["p99"]) == pytest.approx((100, 180, 190, 198))
    assert found["mean"] == pytest.approx(100.5)
    assert (found["min"], found["max"]) == pytest.approx((1, 200))
    assert latencies([0.5])["p99"] == 500


@pytest.mark.parametrize("synthetic_on", [{"generated_data": True}, {"synthetic_data": "device"}])
def test_inference_counts_every_image_of_all_replicas(synthetic_on):
    resolved = resolve(SMALL | synthetic_on | {"num_replicas": 2}, "none")
    result = bench_inference(resolved, batches_per_call=2, num_calls=3, num_requests=5)
    assert (result.batch_size, result.num_replicas, len(result.rates.each)) == (8, 2, 3)
    line = json.loads(json.dumps(result.to_dict()))
    assert line["mode"] == "inference"
    assert line["lowest"] <= line["images_per_second"] <= line["highest"]
    assert 0 < line["latency_milliseconds"]["p50"] <= line["latency_milliseconds"]["p99"]


def test_no_call_looks_instant_where_launching_takes_as_long_as_running(monkeypatch):
    """A GPU's host walks through a device loop's batches, so that the result is there when the launch returns."""
    compiled_from = inference_bench.compiled_from

    def with_slow_launch(build):
        compiled = compiled_from(build)

        def launch(*arguments):
            time.sleep(0.1)
            return jax.block_until_ready(compiled.program(*arguments))

        setattr(launch, "prepare", compiled.program.prepare)  # noqa: B010
        return replace(compiled, program=launch)

    monkeypatch.setattr(inference_bench, "compiled_from", with_slow_launch)
    resolved = resolve(SMALL | {"synthetic_data": "device"}, "none")
    result = bench_inference(resolved, batches_per_call=1, num_calls=3, num_requests=0)
    assert max(result.rates.each) <= result.batch_size / 0.1 * 1.5


def test_the_rate_of_two_processes_is_that_of_both_and_told_once(tmp_path):
    synthetic_on = "--config none --model toy_model --dataset cifar10 --synthetic-data --progress none"
    sizes = "--num-replicas 2 --micro-batch-size 4 --steps-per-call 2 --num-calls 2 --num-requests 2 --json"
    assert run_job(2, ["bench", "--mode", "inference", *synthetic_on.split(), *sizes.split()], tmp_path) == [0, 0]
    told = [[line for line in (tmp_path / f"{n}.txt").read_text().splitlines() if line[:1] == "{"] for n in range(2)]
    assert [len(lines) for lines in told] == [1, 0]
    line = json.loads(told[0][0])
    assert (line["batch_size"], line["num_replicas"], line["device"]) == (8, 2, "2 x cpu")
    assert len(line["each_call"]) == 2


@pytest.mark.parametrize(("mode", "batch"), [("training", "global batch 4 (4 x 1"), ("inference", "batch 4 (4 x 1")])
def test_words_stand_in_front_of_the_line_of_json(mode, batch, capsys):
    words = "--config none --model cifar_resnet8 --dataset cifar10 --synthetic-data --micro-batch-size 4 --num-calls 1"
    assert main(["bench", "--mode", mode, *words.split(), "--steps-per-call", "1", "--num-requests", "1"]) == 0
    *told, line = capsys.readouterr().out.splitlines()
    assert told[0].startswith(mode)
    assert told[1].startswith(batch)
    assert "img/s (median of 1" in told[2]
    assert json.loads(line)["mode"] == mode


@pytest.mark.parametrize(
    "sizes", [{"progressive_resolution": 16, "progressive_resolution_sizes": 2}, {"train_image_size": 16}]
)
def test_calls_of_a_benchmark_have_one_image_size_and_all_their_steps(sizes, monkeypatch):
    launched = []
    compile_call = benchmarks.compile_call

    def counting(executor, *arguments):
        compiled = compile_call(executor, *arguments)

        def launch(*call):
            launched.append((len(call[-1]), executor.spec.network.input_hwc[0]))
            return compiled.program(*call)

        return replace(compiled, program=launch)

    monkeypatch.setattr(benchmarks, "compile_call", counting)
    options = SMALL | {"synthetic_data": "device", "weight_updates_per_epoch": 4, "num_epochs": 1}
    result = bench(resolve(options | sizes, "none"), steps_per_call=2, num_calls=2)
    assert launched == [(2, 16 if "train_image_size" in sizes else 32)] * 3
    assert np.isfinite(result.final_loss)


def test_imagenet_is_made_up_as_published():
    data = config_from({"dataset": "imagenet", "synthetic_data": "ipu", "model_name": "efficientnet_b4"}).data
    info = describe_dataset(data)
    assert (info.image_hwc, info.num_classes) == ((380, 380, 3), 1000)
    assert (info.num_train, info.num_validation) == (1_281_167, 50_000)
    assert (info.synthetic_on, info.channel_mean) == ("device", (0.485, 0.456, 0.406))


def test_cifar_is_made_up_without_its_files(tmp_path):
    data = config_from({"dataset": "cifar10", "generated_data": True, "dataset_path": str(tmp_path)}).data
    opened = open_dataset(data, seed=3)
    assert (len(opened.train), len(opened.validation), opened.info.synthetic_on) == (50000, 10000, "host")
    images = opened.train.read(np.arange(256), 0)
    assert images.shape == (256, 32, 32, 3)
    assert abs(images.mean() - 127.5) < 1  # uniform bytes


def test_a_plan_of_an_absent_imagenet_takes_the_published_numbers(capsys, monkeypatch, tmp_path):
    monkeypatch.delenv("DATASETS_DIR", raising=False)
    monkeypatch.delenv("DATA_DIR", raising=False)
    monkeypatch.chdir(tmp_path)
    words = "plan --config none --model resnet18 --dataset imagenet --micro-batch-size 256"
    assert main(words.split()) == 0

    out = capsys.readouterr().out
    assert "not there, planned as published" in out
    assert "5,004" in out  # 1,281,167 // 256 updates per epoch


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"dataset": "folder", "generated_data": True}, "whose shape is known only from its files"),
        (
            {"generated_data": True, "synthetic_data": "device"},
            "generated_data on .* and synthetic_data",
        ),
    ],
)
def test_made_up_data_is_refused_where_it_cannot_be(options, told):
    with pytest.raises(ConfigError, match=told):
        resolve(options, "none")


def test_a_bare_flag_means_the_device():
    from headrace.cli.options import parse

    for words in (["--synthetic-data"], ["--synthetic-data", "--seed", "1"], ["--synthetic-data", "device"]):
        assert parse([*words, "--dataset", "cifar10"], "headrace plan")[0].config.data.synthetic_on == "device"
    assert (
        parse(["--dataset", "cifar10", "--synthetic-data", "host"], "headrace plan")[0].config.data.synthetic_on
        == "host"
    )


def test_the_shipped_benchmarks_are_the_references_and_ours():
    entries = read_entries(SHIPPED)
    assert entries["resnet50_inference"].sweep == {"batch-size": [1, 4, 16, 32, 64, 90]}
    assert entries["resnet50_inference_host"].sweep == {"batch-size": [1, 4, 16, 32, 64, 80]}
    assert entries["resnext101_inference"].sweep == {"batch-size": [1, 2, 4, 8, 16]}
    assert entries["efficientnet_b0_inference"].sweep == {"batch-size": [1, 8, 16, 32]}
    assert len(entries["gpu_inference"].points()) == 12
    assert len(entries["gpu_inference"].points(["micro-batch-size"])) == 3
    assert len(entries["gpu_inference"].points(["model"])) == 4, "another name of model_name"
    assert entries["resnet50_inference"].points(["batch_size"]) == [{}]


def test_an_entry_runs_each_point_and_typed_options_win(tmp_path):
    file, lines = tmp_path / "mine.yml", tmp_path / "out.jsonl"
    file.write_text(
        "tiny:\n  mode: inference\n  options: --config none --model toy_model --dataset cifar10 --synthetic-data "
        "--steps-per-call 9 --repeat 2\n  sweep: {micro-batch-size: [1, 2]}\n"
    )
    more = ["--steps-per-call", "1", "--num-requests", "0", "--output", str(lines)]
    command = [sys.executable, "-m", "headrace", "bench", "--benchmarks", str(file), "--entry", "ti.*", *more]
    done = run(command, check=True)
    found = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [line["micro_batch_size"] for line in found] == [1, 2]
    assert all(line["batches_per_call"] == 1 and len(line["each_call"]) == 2 for line in found)
    assert "micro-batch-size=2" in done.stdout.splitlines()[-1]


def test_the_table_has_rates_and_then_latencies_and_fits_a_terminal(capsys):
    times = {"min": 3.21, "mean": 3.5, "p50": 3.391, "p99": 12.34, "max": 2010.0, "p90": 4.0}
    entry = "efficientnet_b0_inference_host"
    rows = [
        {"entry": entry, "point": {"batch-size": 32}, "mean": 26590.4, "standard_deviation": 546.0}
        | {"latency_milliseconds": times},
        {"entry": "a", "point": {}, "problem": "exit code 2"},
        {"entry": "b", "point": {}, "mean": 4.618, "standard_deviation": 0.25, "latency_milliseconds": {}},
    ]
    _print_table(rows)
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    assert [line.split() for line in printed.splitlines()] == [
        ["entry", "img/s", "±"],
        [entry, "batch-size=32", "26,590", "546"],
        ["a", "exit", "code", "2"],
        ["b", "4.62", "0.25"],
        [],
        ["latency", "of", "one", "batch,", "in", "ms"],
        ["entry", "min", "mean", "p50", "p99", "max"],
        [entry, "batch-size=32", "3.21", "3.50", "3.39", "12.3", "2,010"],
    ]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a: {mode: serving}", "mode is 'serving'"),
        ("a: {option: --seed 1}", "has the key 'option'"),
        ("a: {sweep: {seed: 1}}", "sweep is"),
        ("a: 3", "not a mapping"),
        ("[1", "not YAML"),
        ("", "names no benchmarks"),
    ],
)
def test_a_bad_file_is_refused(tmp_path, text, told):
    file = tmp_path / "bad.yml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=told):
        read_entries(file)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_entries(Path(tmp_path / "none.yml"))


# (images of a step, of one of its processes; its devices; processes): REFERENCE's table of its benchmark commands
STATED = {
    "resnet50_training": (16 * 1024, 4, 1),
    "resnet50_training_pod16": (16 * 256, 4, 4),
    "resnext101_training": (6 * 64 * 2, 4, 1),
    "resnext101_training_pod16": (6 * 16, 2, 8),
    "efficientnet_b4_g1_training": (5 * 40, 4, 1),
    "efficientnet_b4_g1_training_pod16": (5 * 40, 4, 4),
    "efficientnet_b4_training": (5 * 40, 4, 1),
    "efficientnet_b4_training_pod16": (5 * 40, 4, 4),
}


def planned(words: list[str]):
    words = words[words.index("bench") + 1 :]
    resolved = resolve_arguments(read_config_arguments(words, "headrace bench", add_arguments))
    return design_run(resolved.config).plan


@pytest.mark.parametrize("name", sorted(read_entries(SHIPPED)))
def test_every_shipped_benchmark_can_be_planned(name):
    entry = read_entries(SHIPPED)[name]
    point = entry.points()[-1]
    whole, one = entry.command(point, [], full_plan=True), entry.command(point, [])
    plan = planned(one)
    if name in STATED:
        images, devices, processes = STATED[name]
        asked = whole[: whole.index("bench")]
        assert asked == (["launch", *entry.launch, "--"] if processes > 1 else [])
        assert f"--num-instances {processes}" in " ".join(asked) or processes == 1
        full = planned(whole)
        assert (full.batch.global_batch_size, full.num_devices) == (images, devices)
        assert (plan.batch.global_batch_size, plan.num_devices) == (images * processes, 1)
        assert plan.batch.micro_batch_size == full.batch.micro_batch_size
        assert plan.one_program
        assert entry.mapped
    if "batch-size" in entry.sweep:
        assert "launch" not in one
        assert plan.validation.micro_batch_size == entry.sweep["batch-size"][-1]


def test_data_on_the_command_line_takes_the_place_of_generated_data():
    entry = read_entries(SHIPPED)["resnet50_training"]
    assert "--generated-data" in entry.command({}, [])
    for words in (["--data-dir", "x"], ["--dataset-path=x"], ["--synthetic-data"]):
        assert "--generated-data" not in entry.command({}, words)


def test_the_list_of_benchmarks_fits_a_terminal(capsys):
    assert main(["bench", "--entry", "list"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert all(f"{name}  (" in text for name in read_entries(SHIPPED))
    assert main(["bench", "--entry", "nothing"]) == 2
    assert re.search("no benchmark nothing.*--entry list", capsys.readouterr().err, re.DOTALL)
    assert main(["bench", "--entry", "quick", "--mode", "inference"]) == 2
    assert "quick measures training" in capsys.readouterr().err
