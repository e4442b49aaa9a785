"""The commands, a row each: what help, completion and a mistyped name ask for."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """A command: its name, the function that runs it with an argv as FILE.FUNCTION of cli/, and a line of help."""

    name: str
    function: str
    help: str
    also: str = ""  # what others call it, or what it is looked for as
    parts: tuple[str, ...] = ()  # words that may follow it
    takes_runs: bool = False  # its argument is the directory of a run

    def imported(self) -> Callable[[list[str]], int]:
        """Import the file, and return the function."""
        file, _, function = self.function.partition(".")
        return getattr(importlib.import_module(f"headrace.cli.{file}"), function)


_TRAIN = (
    Command(
        "train",
        "train.main",
        "train a network; alone, the demo",
        also="fit finetune fine-tune fine_tune learn run start",
    ),
    Command(
        "resume", "train.resume", "resume a run from its last checkpoint", also="continue restart", takes_runs=True
    ),
    Command(
        "sweep",
        "sweep.main",
        "train for several values of options, or several folds",
        also="tune search grid gridsearch hpo optuna kfold k-fold cv",
    ),
    Command(
        "lr-find",
        "lr_find.lr_find",
        "find a learning rate by a short run, with a plot",
        also="lr_find lrfind find-lr find_lr lr-finder",
    ),
)

_USE = (
    Command(
        "validate",
        "validate.main",
        "measure the accuracy of a run's checkpoints",
        also="eval evaluate val test score",
        takes_runs=True,
    ),
    Command(
        "predict",
        "predict.main",
        "predict the classes of images",
        also="infer inference classify detect label",
        takes_runs=True,
    ),
    Command(
        "explain",
        "explain.explain",
        "show where in an image a network found its class",
        also="gradcam grad-cam cam saliency interpret",
        takes_runs=True,
    ),
    Command("demo", "demo.demo", "serve a page to drop photographs into", also="serve gradio app try", takes_runs=True),
    Command("export", "export.main", "export weights or a network (ONNX, safetensors, .pth)", takes_runs=True),
    Command(
        "push",
        "push.main",
        "publish a network on the Hugging Face hub, with a model card",
        also="upload publish share hub",
        takes_runs=True,
    ),
    Command("convert", "convert.convert", "make a checkpoint of weights from elsewhere", also="import load"),
    Command(
        "average",
        "average.average",
        "average checkpoints of a run, and validate the result",
        also="swa ema ensemble",
        takes_runs=True,
    ),
)

_RESULTS = (
    Command("runs", "runs.main", "list runs with their results", also="ls list history experiments results"),
    Command("compare", "compare.compare", "print what differs between runs", also="diff", takes_runs=True),
    Command("report", "report.report", "write a run's report, or a comparison, as an HTML file", takes_runs=True),
    Command(
        "board",
        "board.board",
        "serve a live page of the runs in a directory",
        also="ui dashboard tensorboard server web",
    ),
)

_LOOK_UP = (
    Command(
        "models",
        "models.models",
        "list the networks",
        also="model networks zoo architectures archs",
        parts=("list", "show"),
    ),
    Command(
        "configs",
        "configs.configs",
        "list and show recipes, with measured results",
        also="config recipes recipe options settings",
        parts=("list", "show", "options"),
    ),
    Command(
        "devices", "devices.devices", "list devices, their memory, and versions", also="device info env gpus checks"
    ),
    Command(
        "data",
        "data.main",
        "check, build, pack and measure datasets",
        also="dataset datasets download verify",
        parts=("get", "verify", "report", "build", "pack", "bench"),
    ),
    Command("completion", "completion.main", "print the completion script of a shell", parts=("bash", "zsh", "fish")),
)

_PLAN_AND_MEASURE = (
    Command("plan", "plan.main", "print batches, steps and memory of a run, without a device"),
    Command("bench", "bench.main", "measure the throughput of training or inference", also="benchmark speed perf"),
    Command("profile", "profile.profile", "print where the time of the devices goes", takes_runs=True),
    Command(
        "launch",
        "launch.launch",
        "start the processes of a job, here or on other hosts",
        also="torchrun mpirun distributed",
    ),
)

TOPICS: Mapping[str, tuple[Command, ...]] = {
    "train": _TRAIN,
    "use": _USE,
    "results": _RESULTS,
    "look up": _LOOK_UP,
    "plan and measure": _PLAN_AND_MEASURE,
}
COMMANDS: Mapping[str, Command] = {row.name: row for rows in TOPICS.values() for row in rows}
