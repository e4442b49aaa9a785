"""What the help of each command says: descriptions, examples, and which options it lists."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from headrace.config.translations import ApplicationHelp
from headrace.rows.curves import CURVES
from headrace.rows.optimizers import OPTIMIZERS

HELP, HELP_ALL = ("-h", "--help"), "--help-all"
ELSEWHERE = "*"  # stands for the groups of another application's options
_VALIDATING = ("run", "data", "batch", "pipeline", "numerics", "validation", "checkpoint", "compiler")
_ONLY_TRAINING = frozenset(
    (
        "compile_only", "profile", "target_accuracy", "early_stopping", "training", "train_augmentation", "train_crop",
        "shuffle", "repeated_augmentation",
        "balanced_sampling", "num_epochs", "weight_updates_per_epoch", "logs_per_epoch", "ckpts_per_epoch",
        "validations_per_epoch", "call_seconds", "clean_dir", "keep_best", "max_ckpts_to_keep", "average_last_epochs",
        "average_decays", "loss_scaling", "loss_scaling_params", "nan_policy", "stochastic_rounding",
    )
)  # fmt: skip
_EVERYTHING = (
    "run", "data", "augment", "model", "weights", "batch", "pipeline", "numerics", "learning", "validation",
    "checkpoint", "logging", "compiler", ELSEWHERE,
)  # fmt: skip


def some(names: Collection[str], shown: tuple[str, ...]) -> str:
    """Return a few of the names, and how many others there are."""
    assert set(shown) <= set(names)
    return f"{', '.join(shown)} or {len(names) - len(shown)} others"


def _all_but(*groups: str) -> tuple[str, ...]:
    return tuple(group for group in _EVERYTHING if group not in groups)


@dataclass(frozen=True, kw_only=True)
class Screen:
    """The help of one command.

    `rows` has the options for the first screen by topic, as people type them, each with a phrase. `groups` names the
    groups of options that have an effect, less `without`; other options are accepted with a note where `strict`.
    """

    about: str = ""
    examples: tuple[tuple[str, str], ...] = ()
    rows: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    groups: tuple[str, ...] = _EVERYTHING
    without: frozenset[str] = frozenset()
    strict: bool = False
    application: ApplicationHelp | None = None


_DEVICE = {
    "device": "auto, cpu, gpu or tpu",
    "num-replicas": "devices that share each batch",
    "precision": "32.32, 16.32 or 16.16: bits of computation and weights",
}
_BENCHED = {
    "dataset-path DIR": "folder of images, or of a known dataset",
    "dataset": "which dataset",
    "synthetic-data": "random images made on the device instead",
    "model NAME": "network; `headrace models` lists them",
    "image-size": "height and width of the images",
    "micro-batch-size": "images in one pass of one device",
}
_OF_DATA = {"data": {"dataset-path DIR": "folder of images, or of a known dataset", "dataset": "which dataset"}}
_READING = ("data", "augment", "model", "batch", "run", ELSEWHERE)

SCREENS: Mapping[str, Screen] = {
    "train": Screen(
        about="Train a network. Without options: a small ResNet on handwritten digits.",
        examples=(
            ("headrace train", "the demo"),
            ("headrace train photos/ --epochs 20", "images, a folder per class"),
            ("headrace train photos/ --weights timm/resnet50.a1_in1k", ""),
            ("headrace train --config cifar10_resnet20 --seed 1", "a recipe, changed"),
        ),
        rows={
            "data": {
                "dataset-path DIR": "folder of images, or of a known dataset",
                "dataset": "which dataset; auto finds out from the files",
                "image-size": "height and width of the images",
            },
            "network": {
                "model NAME": "network; `headrace models` lists them",
                "weights NAME": "weights to start from: a name, a file, a run",
                "freeze NAME": "weights to keep: backbone, or regular expressions",
            },
            "training": {
                "epochs": "passes over the training images",
                "batch-size": "images per weight update",
                "lr": "peak learning rate",
                "lr-schedule": some(CURVES, ("cosine", "const", "flat_cosine")),
                "warmup-epochs": "epochs until the learning rate has its peak",
                "optimizer": some(OPTIMIZERS, ("sgd", "adamw", "muon")),
                "weight-decay": "decay of the weights, times the learning rate",
                "early-stopping": "end after N validations without a better one",
                "seed": "seed of all randomness",
            },
            "device": _DEVICE,
            "results": {
                "output DIR": "directory of the run [runs/NETWORK-DATASET-TIME]",
                "dry-run-steps": "stop after a few steps, to try things out",
                "tensorboard": "write event files for TensorBoard",
            },
        },
    ),
    "sweep": Screen(
        about="Train once for each combination of values, separated by commas, and compare the runs at the end. "
        "The same command, or headrace resume DIR, continues a sweep.",
        examples=(
            ("headrace sweep photos/ --lr 0.01,0.03 --model resnet18,resnet34", ""),
            ("headrace sweep photos/ --folds 5", "mean and spread over five folds"),
            ("headrace sweep photos/ --seed 1,2,3 --jobs 3", "a GPU for each"),
        ),
        rows={"results": {"output DIR": "directory of the sweep [runs/sweep-TIME]"}, "device": _DEVICE},
    ),
    "lr-find": Screen(
        about="Find a learning rate: a short run whose rate grows until the loss rises. Only the plot is written.",
        examples=(("headrace lr-find --dataset-path photos/", "for your images"),),
        rows={
            "data": {"dataset-path DIR": "folder of images, or of a known dataset"},
            "training": {"model NAME": "network", "batch-size": "images per weight update", "optimizer": "optimizer"},
            "device": _DEVICE,
        },
        groups=_all_but("validation", "checkpoint", "logging"),
        without=frozenset(("learning_rate", "lr_schedule", "lr_schedule_params", "lr_warmup_params", "warmup_epochs")),
        strict=True,
    ),
    "resume": Screen(
        about="Resume a run from its newest good checkpoint, bit for bit. Its options apply; these may change.",
        examples=(
            ("headrace resume runs/NAME", "train to the planned end"),
            ("headrace resume runs/NAME --epochs 40", "train longer than planned"),
        ),
        rows={
            "data": {"dataset-path DIR": "where the dataset is now"},
            "training": {
                "epochs": "passes over the training images, those done included",
                "lr": "peak learning rate of the steps to come",
            },
            "device": {
                "device": "auto, cpu, gpu or tpu",
                "num-replicas": "devices that share each batch; the batch stays",
            },
            "results": {
                "checkpoint-dir DIR": "where checkpoints are kept",
                "max-ckpts-to-keep": "newest checkpoints to keep",
                "tensorboard": "write event files for TensorBoard",
            },
        },
        groups=_all_but("model", "weights", ELSEWHERE),
        without=frozenset(
            (
                "seed",
                "dataset",
                "decode_once",
                "balanced_sampling",
                "repeated_augmentation",
                "shuffle",
                "optimizer",
                "precision",
                "half_type",
                "ema_decay",
            )
        ),
    ),
    "validate": Screen(
        about="Validate all checkpoints of a run, or one of them. The options of the run apply; these may change.",
        examples=(
            ("headrace validate runs/NAME --best", "the best checkpoint"),
            ("headrace validate runs/NAME photos2/", "on other images of its classes"),
            ("headrace validate --weights timm/resnet50.a1_in1k --dataset-path imagenet/", ""),
        ),
        rows={
            "data": {
                "dataset-path DIR": "where the dataset is",
                "validation-path DIR": "the same as FOLDER",
            },
            "device": {
                "device": "auto, cpu, gpu or tpu",
                "validation-micro-batch-size": "images in one pass of one device",
                "validation-num-replicas": "devices that validate",
                "precision": "bits of the computation",
            },
        },
        groups=(*_VALIDATING, "weights"),
        without=_ONLY_TRAINING | {"freeze", "variable_filter", "layer_lr", "layer_decay"},
        strict=True,
    ),
    "convert": Screen(
        about="Make a checkpoint of weights from elsewhere, for headrace predict, validate and export. The network "
        "comes with a known name; of a plain file, name it with --model.",
        examples=(
            ("headrace convert timm/resnet50.a1_in1k --out r50", "a known name"),
            ("headrace convert mine.pth --model resnet18 --out r18", "a plain file"),
        ),
        rows={
            "network": {
                "model NAME": "network of a plain file; `headrace models` lists them",
                "model-dialect": "whose padding and epsilon, where the names in the file leave it open",
                "init-ema": "the averaged weights in the file",
            },
            "input": {"image-size": "height and width of the images", "pixel-mean": "mean of each channel"},
        },
        groups=("model", "weights", "data"),
        without=frozenset(("weights",)),
        strict=True,
    ),
    "average": Screen(
        about="Average the newest checkpoints of a run in float64, and validate the result. It is a checkpoint under "
        "averages/ in the run. The options of the run apply to the validation; these may change.",
        examples=(("headrace average runs/NAME --last 5", "the mean of the last five"),),
        rows={"data": {"dataset-path DIR": "where the dataset is"}, "device": {"device": "auto, cpu, gpu or tpu"}},
        groups=_VALIDATING,
        without=_ONLY_TRAINING - {"average_decays"},
        strict=True,
    ),
    "plan": Screen(
        about="Print batches, steps, learning rate, memory and pipeline of a run, without a device.",
        examples=(
            ("headrace plan --config cifar10_resnet20", "what a recipe would do"),
            ("headrace plan --dataset-path photos/ --batch-size 64", "your images"),
        ),
        rows={
            "data": {"dataset-path DIR": "folder of images, or of a known dataset", "dataset": "which dataset"},
            "network": {"model NAME": "network; `headrace models` lists them", "image-size": "size of the images"},
            "training": {
                "epochs": "passes over the training images",
                "batch-size": "images per weight update",
                "lr": "peak learning rate",
                "gradient-accumulation-count": "passes whose gradients make one update",
            },
            "device": {
                "num-replicas": "devices that share each batch",
                "num-pipeline-stages": "stages that the network is cut into",
                "precision": "32.32, 16.32 or 16.16: bits of computation and weights",
            },
        },
        groups=_all_but("logging"),
        strict=True,
    ),
    "bench": Screen(
        about="Measure images per second: training (the real feed and device loop, without validation, records and "
        "checkpoints) or inference. With --synthetic-data only the device is measured.",
        examples=(
            ("headrace bench --config synthetic_resnet50", "training, the device alone"),
            ("headrace bench --dataset-path photos/", "training, with decoding"),
            ("headrace bench --list", "the named benchmarks"),
        ),
        rows={"what": _BENCHED, "device": _DEVICE},
        groups=_all_but("validation", "checkpoint", "logging", "weights"),
        strict=True,
    ),
    "profile": Screen(
        about="Record a few calls of training after two that warm up, and print where the time of the devices went: "
        "by kind of work and by block, the slowest kernels, use of arithmetic and memory bandwidth. Of a run that was "
        "profiled (train --profile), print that; of another run, profile its options.",
        examples=(
            ("headrace profile --config synthetic_resnet50", "a recipe, the device alone"),
            ("headrace profile runs/NAME", "a run"),
        ),
        rows={"what": _BENCHED, "device": _DEVICE},
        groups=_all_but("validation", "checkpoint", "logging", "weights"),
        strict=True,
    ),
    "configs show": Screen(
        about="Print a configuration as YAML, each value with its origin. All options of headrace train are accepted.",
        examples=(("headrace configs show cifar10_resnet20 --lr 0.2", "a recipe, changed"),),
    ),
    "data verify": Screen(
        about="Read every file of a dataset and report what is wrong with it.",
        examples=(("headrace data verify --dataset-path photos/", "your images"),),
        rows=_OF_DATA,
        groups=("data", ELSEWHERE),
    ),
    "data report": Screen(
        about="Write a page about a dataset: counts and sizes, images of each class, images that are nearly equal and, "
        "with a run, labels that are doubtful.",
        examples=(
            ("headrace data report photos/", "data.html"),
            ("headrace data report photos/ --run runs/NAME", "judged by a run's network"),
        ),
        rows=_OF_DATA,
        groups=("data", ELSEWHERE),
    ),
    "data build": Screen(
        about="Write class folders as TFRecords, as ImageNet's: a few large files that other programs read.",
        examples=(("headrace data build --dataset-path photos/ --output-dir records/", ""),),
        rows=_OF_DATA,
        groups=_READING,
    ),
    "data pack": Screen(
        about="Pack the images of a dataset, made smaller, into one file that is read two to three times as fast.",
        examples=(("headrace data pack --dataset-path photos/ --output photos.hrp", ""),),
        rows=_OF_DATA,
        groups=_READING,
    ),
    "data bench": Screen(
        about="Measure how many images per second the host reads, decodes and prepares, by the number of threads.",
        examples=(("headrace data bench --dataset-path photos/", ""),),
        rows=_OF_DATA,
        groups=_READING,
    ),
}
OTHER = Screen(rows=_OF_DATA, groups=_READING)
