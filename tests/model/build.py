"""Short ways to a network."""

from headrace.config.load import config_from
from headrace.model import Network, build_network
from headrace.model.families import model_row


def network(
    name: str = "cifar_resnet8", num_classes: int = 0, image: tuple[int, int, int] | None = None, **options
) -> Network:
    """Build a network by name, at its own image size and classes unless told otherwise."""
    row = model_row(name)
    model = config_from({"model_name": name, **options}).model
    return build_network(model, num_classes or row.num_classes, image or (row.image_size, row.image_size, 3))
