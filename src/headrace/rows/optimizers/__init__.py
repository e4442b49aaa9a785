"""The optimizers, by name. A new one is a file here and its name in this tuple."""

from collections.abc import Mapping

from headrace.rows.optimizers.adam import ADAM, ADAMW, LAMB, NADAM, RADAM
from headrace.rows.optimizers.given import GIVEN
from headrace.rows.optimizers.lars import LARS
from headrace.rows.optimizers.lion import LION
from headrace.rows.optimizers.muon import MUON
from headrace.rows.optimizers.rmsprop import RMSPROP
from headrace.rows.optimizers.sgd import MOMENTUM, SGD
from headrace.rows.row import OptimizerRow

OPTIMIZERS: Mapping[str, OptimizerRow] = {
    row.name: row for row in (SGD, MOMENTUM, MUON, ADAMW, ADAM, NADAM, RADAM, LION, RMSPROP, LARS, LAMB, GIVEN)
}
