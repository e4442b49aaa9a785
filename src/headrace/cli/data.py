"""`headrace data verify`: check a whole data set and print its counts and what is wrong with it."""

from headrace.core.errors import ConfigError, did_you_mean

_ACTIONS = ("verify",)
_USAGE = "headrace data verify [--dataset NAME] [--dataset-path DIRECTORY]"


def main(argv: list[str]) -> int:
    """Run the command; return 0, or 1 when something is wrong with the data set."""
    if not argv or argv[0] in ("-h", "--help"):
        print(f"usage: {_USAGE}\n\nCheck all files of a data set and print the images of each class and split.")
        return 0
    action, *rest = argv
    if action not in _ACTIONS:
        raise ConfigError(f"There is no `headrace data {action}`.", remedy=did_you_mean(action, _ACTIONS))
    from headrace.cli.options import parse
    from headrace.data.verify import format_report, verify

    resolved, _ = parse(rest, "headrace data verify")
    report = verify(resolved.config.data)
    print(format_report(report))
    return 1 if report.problems else 0
