"""Networks: layers and blocks as frozen values with pure methods, and network families as rows of tables."""

from headrace.model.context import Ctx as Ctx
from headrace.model.cost import Cost as Cost
from headrace.model.families import build_network as build_network
from headrace.model.families import model_names as model_names
from headrace.model.network import Network as Network
