"""`headrace models`: the networks, one of them block by block, and the weights there are."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from headrace.cli.tables import Column, table_lines
from headrace.config.command_line import Parser, take_options
from headrace.config.field import COMMAND_LINE, find_option, option_names
from headrace.config.schema import all_options
from headrace.core.errors import ConfigError

if TYPE_CHECKING:
    from headrace.model.network import Network


_MODELS = """usage: headrace models [list] [TEXT] [options]
       headrace models show NAME [options]
       headrace models --weights [TEXT]

list (or nothing)  all networks, or those with TEXT in their name: parameters, FLOPs per image, image size
show               one network block by block; each block is a split point, and so is each layer inside one
--weights          the known names of trained weights, those that contain TEXT

Without options a network has the image size and number of classes it was designed for.
  --dataset NAME       the image shape and classes of a dataset
  --image-size PIXELS  --num-channels COUNT  --num-classes COUNT
  and all options of the network, such as --model-size 50, --group-norm, --group-dim 16"""

_TRANSFORMERS = ("vit", "deit", "swin", "beit", "eva", "former", "dino", "clip")
_IMAGE_OPTIONS = ("dataset", "image_size", "num_channels", "num_classes")


def models(argv: list[str]) -> int:
    """Run the command; return its exit code."""
    if any(word in ("-h", "--help") for word in argv):
        print(_MODELS)
        return 0
    if argv and argv[0] == "--weights":
        return _list_weights(argv[1:])
    if argv and argv[0] == "show":
        return _show_model(argv[1:])
    return _list_models(argv[1:] if argv and argv[0] == "list" else argv)


def _list_models(argv: list[str]) -> int:
    parser = Parser(prog="headrace models")
    parser.add_argument("text", nargs="?", default="", metavar="TEXT")
    options, args = _network_options(argv, parser)
    from headrace.model.cost import FLOPS_CONVENTION
    from headrace.model.zoo import model_names

    rows, problems = [], []
    for name in _names_with(args.text, model_names()):
        try:
            network = _build(name, options)
        except ConfigError as error:
            problems.append(error.problem)
            continue
        cost = network.total_cost()
        rows.append(
            (name, f"{cost.params:,}", _count(cost.flops), _shape(network.input_hwc), f"{network.num_classes:,}")
        )
    print(f"FLOPs per image, forward: {FLOPS_CONVENTION}.")
    _print_table(("name", "parameters", "FLOPs", "image", "classes"), rows)
    for problem in problems:
        print(problem)
    return 0


def _names_with(text: str, names: Iterable[str]) -> list[str]:
    """Return the names that contain a text, whatever its case and dashes."""
    plain = _plain(text)
    found = [name for name in names if plain in _plain(name)]
    if not found:
        rule = "Networks here are convolutional: there are no transformers."
        raise ConfigError(
            f"No network has {text!r} in its name.",
            rule=rule if any(word in plain for word in _TRANSFORMERS) else "",
            remedy="`headrace models` lists all networks.",
        )
    return found


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


def _list_weights(argv: list[str]) -> int:
    from headrace.weights.published import published_weights

    parser = Parser(prog="headrace models --weights")
    parser.add_argument("text", nargs="?", default="", metavar="TEXT")
    text = parser.parse_args(argv).text.lower()
    rows = []
    for row in published_weights().values():
        network, data = row.facts.network["model_name"], row.facts.data
        if text in row.name.lower() or text in network:
            rows.append((row.name, network, str(data["image_size"])))
    if not rows:
        raise ConfigError(f"No known weights have {text!r} in their name.", remedy="`headrace models --weights`")
    _print_table(("name", "network", "image"), rows)
    print(f"{len(rows):,} names for --weights; also hf:OWNER/NAME, an address, a file, a run")
    return 0


def _show_model(argv: list[str]) -> int:
    parser = Parser(prog="headrace models show")
    parser.add_argument("name", metavar="NAME")
    options, args = _network_options(argv, parser)
    from headrace.model.cost import FLOPS_CONVENTION

    network = _build(args.name, options)
    total = network.total_cost()
    print(f"{network.name}: {_shape(network.input_hwc)} images, {network.num_classes:,} classes")
    print(f"FLOPs per image, forward: {FLOPS_CONVENTION}.")
    costs, others = network.costs().items(), _other_names(network)
    rows = [
        (name, _shape(shape), f"{cost.params:,}", _count(cost.flops), " ".join(others.get((i, 0), [])))
        for i, ((name, cost), shape) in enumerate(zip(costs, network.shapes()[1:], strict=True))
    ]
    rows.append(("total", "", f"{total.params:,}", _count(total.flops), ""))
    if not any(row[-1] for row in rows):
        rows = [row[:-1] for row in rows]
    _print_table(("block", "output", "parameters", "FLOPs", "other names")[: len(rows[0])], rows)
    _print_inner(network, others)
    return 0


def _other_names(network: "Network") -> dict[tuple[int, int], list[str]]:
    """Return the names in other dialects of every place for a cut."""
    points = network.split_points()
    names: dict[tuple[int, int], list[str]] = {}
    for alias in dict.fromkeys(alias for alias, _ in network.aliases):
        if alias in points and alias not in network.block_names:
            names.setdefault(points[alias], []).append(alias)
    return names


def _print_inner(network: "Network", others: Mapping[tuple[int, int], list[str]]) -> None:
    """Print the layers inside blocks before which a cut may lie, one line for all blocks that have the same."""
    from headrace.model.composite import split_layers

    alike: dict[str, list[int]] = {}
    for i, (name, block) in enumerate(network.blocks):
        pieces = " ".join(piece.removeprefix(f"{name}/") for piece, _ in split_layers(name, block)[1:])
        if pieces:
            alike.setdefault(pieces, []).append(i)
    if not alike:
        return
    print("\nA cut may also lie inside a block, before a layer: BLOCK/LAYER or BLOCK_LAYER.")
    for pieces, blocks in alike.items():
        print(f"{', '.join(network.block_names[i] for i in blocks)}:\n  {pieces}")
    if named := [name for (_, piece), names in others.items() if piece for name in names]:
        print(f"Other names for such cuts: {' '.join(named)}")


def _network_options(argv: list[str], parser: Parser) -> tuple[dict[str, Any], Any]:
    """Return the options of the network and of its images as read, by name, and the command's other arguments."""
    taken, left = take_options(argv, parser)
    options = {}
    for written, raw in taken.items():
        spelled = find_option(written, option_names(all_options()))
        option = all_options()[spelled.name]
        if option.section != "model" and option.name not in _IMAGE_OPTIONS:
            raise ConfigError(f"{option.flag} does not change a network.", remedy=f"See `{parser.prog} --help`.")
        options[written] = raw if spelled.negated else option.read(raw, COMMAND_LINE)
    return options, parser.parse_args(left)


def _build(name: str, options: Mapping[str, Any]) -> "Network":
    """Build a network for the sizes given, else for those of the dataset, else for its default sizes."""
    from headrace.config.load import config_from
    from headrace.config.networks import find_variant
    from headrace.data.dataset import describe_dataset
    from headrace.model.zoo import build_network

    variant = find_variant(name, options.get("model_size"), options.get("image_size"))
    (height, width, channels), num_classes = (variant.image_size, variant.image_size, 3), variant.num_classes
    if options.get("dataset"):
        info = describe_dataset(config_from({"dataset": options["dataset"]}).data)
        (height, width, channels), num_classes = info.image_hwc, info.num_classes
    if options.get("image_size"):
        height = width = options["image_size"]
    channels = options.get("num_channels") or channels
    chosen = {key: value for key, value in options.items() if key not in _IMAGE_OPTIONS}
    model = config_from({**chosen, "model_name": variant.name}).model
    return build_network(model, options.get("num_classes") or num_classes, (height, width, channels))


def _print_table(titles: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    """Print a table: names and dialects to the left, numbers to the right."""
    cells = zip(*rows, strict=True)
    left = ("name", "network", "block", "other names")
    columns = [Column(title=t, cells=c, right=t not in left) for t, c in zip(titles, cells, strict=False)]
    print("\n".join(table_lines(columns)))


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def _count(number: int) -> str:
    """Return a count with four digits and its unit, such as 24.48 M."""
    value, units = float(number), ["", "k", "M", "G", "T"]
    while value >= 999.95 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{number} " if len(units) == 5 else f"{value:.4g} {units[0]}"
