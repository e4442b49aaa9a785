"""The rough duration of a run, beside what was measured (benchmarks/dated/2026-11-18-cpu.md, -h200.md)."""

import pytest

from headrace.config.load import resolve
from headrace.plan.duration import PASSES, SPEEDS, Speed, expected_duration, speed_of
from headrace.run.design import Design, design_run


def design_of(model: str, size: int, batch: int, **more: object) -> Design:
    options = {"model": model, "dataset": "synthetic", "image_size": size, "batch_size": batch}
    options |= {"num_classes": 1000 if size > 32 else 10, "num_samples": 25600, "num_epochs": 1}
    return design_run(resolve({**options, **more}, config_name="none").config)


@pytest.mark.parametrize(
    ("model", "size", "batch", "milliseconds"),
    [
        ("resnet50", 224, 8, 1670),
        ("cifar_resnet8", 32, 32, 21.3),
        ("cifar_resnet20", 32, 128, 256),
        ("efficientnet_b0", 224, 16, 948),
        ("mobilenet_v2", 224, 16, 595),
    ],
)
def test_steps_measured_on_two_cores(model, size, batch, milliseconds):
    design = design_of(model, size, batch)
    found = expected_duration(design.plan, design.network, design.sizes, SPEEDS["cpu"], precision="32.32", processors=2)
    assert 1 / 1.5 < 1e3 * found.step_seconds / milliseconds < 1.5


@pytest.mark.parametrize(
    ("model", "size", "batch", "images_per_second"),
    [
        ("resnet50", 224, 256, 8064),
        ("resnet50", 128, 64, 12700),
        ("cifar_resnet8", 32, 32, 50_100),
        ("efficientnet_b0", 224, 256, 9040),
    ],
)
def test_rates_measured_on_an_h200(model, size, batch, images_per_second):
    design = design_of(model, size, batch, precision="16.32")
    found = expected_duration(design.plan, design.network, design.sizes, SPEEDS["H200"], precision="16.32")
    assert 1 / 1.5 < batch / found.step_seconds / images_per_second < 1.5


PLAIN = Speed(flops=1e9, elements=1e9, block_seconds=0.0, float32_factor=2.0)


def test_parts_add_up():
    design = design_of("cifar_resnet8", 32, 32, validations_per_epoch=2, num_epochs=3)
    plan, cost = design.plan, design.network.total_cost()
    found = expected_duration(plan, design.network, design.sizes, PLAIN, precision="16.32")
    assert found.step_seconds == pytest.approx(32 * (3 * cost.flops + cost.activation_elements) / 1e9)
    assert (found.num_steps, found.num_validations) == (3 * 800, 6)
    images = plan.validation.num_batches * plan.validation.batch_size
    assert found.validation_seconds == pytest.approx(images * (cost.flops + cost.activation_elements / PASSES) / 1e9)
    assert found.seconds == pytest.approx(2400 * found.step_seconds + 6 * found.validation_seconds)


def test_replicas_share_a_cpu_and_divide_the_batch_of_accelerators():
    one, two = design_of("cifar_resnet8", 32, 32), design_of("cifar_resnet8", 32, 32, num_replicas=2)

    def seconds(design: Design, processors: int) -> float:
        found = expected_duration(
            design.plan, design.network, design.sizes, PLAIN, precision="16.32", processors=processors
        )
        return found.step_seconds

    assert seconds(two, 4) == pytest.approx(seconds(one, 4))
    assert seconds(two, 0) == pytest.approx(seconds(one, 0) / 2)


def test_sizes_that_grow_take_less():
    full = design_of("cifar_resnet8", 32, 32)
    growing = {"progressive_resolution": 16, "progressive_resolution_sizes": 2, "progressive_resolution_end": 0.5}
    both = (full, design_of("cifar_resnet8", 32, 32, **growing))
    found = [expected_duration(d.plan, d.network, d.sizes, PLAIN, precision="16.32").step_seconds for d in both]
    assert found[1] == pytest.approx(found[0] * (0.5 * 0.25 + 0.5))  # a quarter of the pixels for half of the steps


def test_speeds_by_device():
    assert speed_of("cpu", "") is SPEEDS["cpu"]
    assert speed_of("gpu", "NVIDIA H200") is SPEEDS["H200"]
    assert speed_of("gpu", "NVIDIA GeForce RTX 4090") is None
