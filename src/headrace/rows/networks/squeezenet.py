"""SqueezeNet 1.0."""

from headrace.rows.network import Family, NetworkRow

SQUEEZENET = Family(
    name="squeezenet",
    module="headrace.model.families.squeezenet",
    options=("dropout_rate", "use_bypass"),
    rows=(
        NetworkRow(name="squeezenet", family="squeezenet", other_names=("squeezenet10", "squeezenet1.0"), norm="none"),
    ),
)
