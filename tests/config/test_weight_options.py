"""The options that come with known weights: over a recipe, below what was asked for, and only where they apply."""

import pytest

from headrace.config.load import resolve, resolve_code

NAME = "timm/resnet50.a1_in1k"
IMAGENET = (0.485, 0.456, 0.406)


def chosen(**options):
    """Return the configuration of these options with known weights."""
    return resolve({"weights": NAME, **options}, environ={})


def test_network_and_input_come_with_a_name():
    found = chosen(dataset_path="photos")
    config = found.config
    assert (config.model.model_name, config.model.model_dialect) == ("resnet50", "timm")
    data = config.data
    assert (data.image_size, data.eval_resize_size, data.eval_interpolation) == (224, 235, "bicubic")
    assert data.pixel_mean == IMAGENET
    assert str(found.origins["model_dialect"]) == str(found.origins["pixel_std"]) == f"chosen with {NAME}"
    again = resolve_code({"weights": NAME, "dataset": "folder"}).config
    assert (again.model.model_dialect, again.data.pixel_std) == ("timm", data.pixel_std)


def test_what_is_asked_for_wins():
    data = chosen(dataset_path="photos", image_size=112, eval_interpolation="bilinear", normalization="zero-one")
    data = data.config.data
    assert (data.image_size, data.eval_resize_size, data.eval_interpolation) == (112, 117, "bilinear")
    assert data.pixel_mean is None
    assert chosen(dataset_path="photos", model_dialect="torchvision").config.model.model_dialect == "torchvision"
    assert chosen(dataset_path="photos", model_name="ResNet-50").config.model.model_dialect == "timm"
    other = chosen(dataset_path="photos", model_name="resnet18").config
    assert (other.model.model_name, other.model.model_dialect) == ("resnet18", "reference")
    assert other.data.pixel_mean == IMAGENET
    # the family's options of a recipe's network go, those of the command line are for the weights' network
    weights = {"weights": "timm/efficientnet_b0.ra_in1k", "dropout_rate": 0.3}
    model = resolve({**weights, "dataset_path": "photos"}, environ={}).config.model
    assert (model.model_name, model.dropout_rate) == ("efficientnet_b0", 0.3)


@pytest.mark.parametrize(
    ("dataset", "size", "mean"),
    [("cifar10", None, IMAGENET), ("mnist", None, None), ("digits", None, None), ("synthetic", 224, None)],
)
def test_only_what_applies_to_a_dataset_is_taken(dataset, size, mean):
    data = chosen(dataset=dataset).config.data
    assert (data.image_size, data.pixel_mean, data.eval_interpolation) == (size, mean, "bilinear")
