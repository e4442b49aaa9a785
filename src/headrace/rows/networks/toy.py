"""Toy networks, for tests and first steps."""

from headrace.rows.network import Family, NetworkRow

TOY = Family(
    name="toy_model",
    module="headrace.model.families.toy",
    groups=(4, 4),
    rows=(
        NetworkRow(name="toy_model", family="toy_model", image_size=32, num_classes=10, norm="none"),
        NetworkRow(name="toy_model_bn", family="toy_model", size="bn", image_size=32, num_classes=10),
    ),
)
