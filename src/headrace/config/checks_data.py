"""What goes together in the options of a data set, and what does not."""

from headrace.config.rule import Facts, Rule
from headrace.config.schema import all_options
from headrace.config.sections_data import LIKENESSES, MADE_UP_DATASETS, PICTURE_DATASETS


def _only_for(name: str, datasets: tuple[str, ...], what: str) -> Rule:
    """Refuse an option that another data set would ignore."""

    def broken(facts: Facts) -> bool:
        given = getattr(facts.config.data, name) != all_options()[name].default
        return given and facts.config.data.dataset not in datasets

    return Rule(
        broken=broken,
        problem=lambda facts: (
            f"{facts.told(name)} is given for the data set {facts.config.data.dataset}, which has its own."
        ),
        rule=f"{name} describes {what}: the data sets {', '.join(datasets)}.",
        remedy=f"Leave {name} out, or choose --dataset {datasets[-1]}.",
    )


_PICTURE_OPTIONS = (
    "validation_split",
    "train_crop",
    "crop_area",
    "crop_aspect",
    "sent_image_size",
    "eval_resize_size",
    "resize_antialias",
    "max_bad_samples",
)

DATA_RULES = (
    *(_only_for(name, MADE_UP_DATASETS, "made-up images") for name in ("num_classes", "num_samples")),
    *(
        _only_for(name, PICTURE_DATASETS + MADE_UP_DATASETS, "pictures and made-up images")
        for name in ("image_size", "num_channels")
    ),
    *(_only_for(name, PICTURE_DATASETS, "pictures") for name in _PICTURE_OPTIONS),
    Rule(
        broken=lambda facts: (
            facts.config.data.dataset_cache in ("raw", "decoded") and facts.config.data.dataset not in PICTURE_DATASETS
        ),
        problem=lambda facts: f"{facts.told('dataset_cache')} for the data set {facts.config.data.dataset}.",
        rule="raw and decoded are for pictures; the other sets lie in memory as they are.",
        remedy="Choose auto, device or host.",
    ),
    Rule(
        broken=lambda facts: (
            facts.config.data.dataset_host_budget != all_options()["dataset_host_budget"].default
            and facts.config.data.dataset_cache not in ("raw", "decoded")
        ),
        problem=lambda facts: f"{facts.told('dataset_host_budget')} with {facts.told('dataset_cache')}.",
        rule="The budget is for pictures kept in the host's memory.",
        remedy="Add --dataset-cache raw or decoded, or leave the budget out.",
    ),
    Rule(
        broken=lambda facts: bool(facts.config.data.sent_image_size and facts.config.data.made_up),
        problem=lambda facts: f"{facts.told('sent_image_size')}, but the images are made up.",
        rule="sent_image_size is for real pictures: made-up images are cropped nowhere.",
        remedy="Leave sent_image_size out, or raise image_size.",
    ),
    Rule(
        broken=lambda facts: bool(
            facts.config.data.sent_image_size and facts.config.data.train_augmentation in ("none", "flip")
        ),
        problem=lambda facts: f"{facts.told('sent_image_size')} with {facts.told('train_augmentation')}.",
        rule="Larger pictures are sent for the device to crop them at random.",
        remedy="Choose --train-augmentation crop or flip-crop, or leave one of the two out.",
    ),
    Rule(
        broken=lambda facts: facts.config.data.generated_data and facts.config.data.synthetic_data is not None,
        problem=lambda facts: f"{facts.told('generated_data')} and {facts.told('synthetic_data')}.",
        rule="Generated images are made on the host and sent, synthetic ones are made on the device.",
        remedy="Leave one of them out.",
    ),
    *(
        Rule(
            broken=lambda facts, name=name: (
                bool(getattr(facts.config.data, name)) and facts.config.data.dataset not in LIKENESSES
            ),
            problem=lambda facts, name=name: (
                f"{facts.told(name)} for the data set {facts.config.data.dataset}, whose shape only its files tell."
            ),
            rule=f"Images can be made up in the likeness of {', '.join(LIKENESSES)}.",
            remedy="Choose one of these, or --dataset generated or synthetic with --image-size and --num-classes.",
        )
        for name in ("generated_data", "synthetic_data")
    ),
    Rule(
        broken=lambda facts: (
            facts.config.data.dataset in PICTURE_DATASETS and facts.config.data.num_channels not in (1, 3)
        ),
        problem=lambda facts: f"{facts.told('num_channels')} for pictures.",
        rule="Pictures are decoded to 3 channels (RGB) or 1 (grey).",
        remedy="Leave num_channels out, or give 1.",
    ),
)
