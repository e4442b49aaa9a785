"""Where a set is kept, with the reason; and the set on the device."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from headrace.config.load import config_from
from headrace.config.schema import Data
from headrace.core.errors import ConfigError
from headrace.data.dataset import describe_dataset, open_dataset
from headrace.data.feeding.block_reader import feed_options
from headrace.data.feeding.cache import decide_cache, make_resident


def decided(num_devices: int = 1, **options: Any) -> tuple[str, str]:
    data = config_from(options).data
    return decide_cache(describe_dataset(data), data, num_devices)


@pytest.mark.parametrize(
    ("options", "where", "reason"),
    [
        ({"dataset": "digits"}, "device", "1.8 MiB fit the budget of 2.0 GiB"),
        # 60,000 images of 3,072 bytes and a label of 4: 184,560,000 bytes = 176.01 MiB
        ({"dataset": "cifar10"}, "device", "176.0 MiB fit"),
        ({"dataset": "cifar10", "dataset_device_budget": "184560000"}, "device", "fit"),
        ({"dataset": "cifar10", "dataset_device_budget": "184559999"}, "host", "do not fit"),
        ({"dataset": "cifar10", "dataset_cache": "host"}, "host", "--dataset-cache host"),
        (
            {"dataset": "cifar10", "dataset_device_budget": "1MiB", "dataset_cache": "device"},
            "device",
            "--dataset-cache",
        ),
        ({"dataset": "cifar10", "accelerator_side_preprocess": False}, "host", "the host preprocesses"),
        ({"dataset": "generated"}, "host", "measure the transfer"),
        ({"dataset": "generated", "dataset_cache": "device"}, "device", "--dataset-cache device"),
        ({"dataset": "synthetic"}, "device", "made on the device"),
        ({"dataset": "synthetic", "dataset_device_budget": "1kB"}, "device", "made on the device"),
    ],
)
def test_where(options: dict[str, Any], where: str, reason: str) -> None:
    choice = decided(**options)
    assert choice[0] == where
    assert reason in choice[1]


def test_each_device_keeps_a_copy() -> None:
    assert "on each of 4 devices" in decided(4, dataset="cifar10")[1]


def test_a_set_on_the_device_cannot_be_preprocessed_on_the_host() -> None:
    data = Data(dataset_cache="device", accelerator_side_preprocess=False)
    with pytest.raises(ConfigError, match="accelerator_side_preprocess"):
        decide_cache(describe_dataset(data), data, 1)


def test_eight_bits_cannot_carry_preprocessed_images() -> None:
    with pytest.raises(ConfigError, match="8 bits"):
        config_from({"eight_bit_transfer": True, "accelerator_side_preprocess": False})


@pytest.mark.parametrize("device_side", [True, False])
def test_eight_bit_transfer_follows_the_side_of_preprocessing(device_side: bool) -> None:
    data = Data(accelerator_side_preprocess=device_side)
    assert feed_options(data, describe_dataset(data), 0, 1).eight_bit_transfer is device_side


def test_the_resident_set_holds_every_image(put: Callable[[Any, str], Any]) -> None:
    dataset = open_dataset(config_from({}).data, 0)
    resident = make_resident(dataset.validation, put)
    assert resident["images"].dtype == np.uint8
    assert (np.asarray(resident["images"]) == dataset.validation.read(np.arange(360), 0)).all()
    assert np.asarray(resident["labels"]).tolist() == dataset.validation.labels.tolist()


def test_synthetic_images_are_made_on_the_device_and_equal_generated_ones(put: Callable[[Any, str], Any]) -> None:
    options = {"image_size": 7, "num_channels": 1, "num_samples": 1100}
    synthetic, generated = (
        open_dataset(config_from({"dataset": name} | options).data, 3).train for name in ("synthetic", "generated")
    )
    given = []

    def watching(tree: Any, kind: str) -> Any:
        given.extend(jax.tree.leaves(tree))
        return put(tree, kind)

    resident = make_resident(synthetic, watching)
    assert all(isinstance(leaf, jax.Array) for leaf in given), "nothing may come from the host"
    assert (np.asarray(resident["images"]) == generated.read(np.arange(1024), 0)).all()
    assert (np.asarray(resident["labels"]) == generated.labels[:1024]).all()
