"""`headrace train`: train a network, from the embedded default to any configuration."""

from headrace.cli.options import parse
from headrace.reference.scripts import take_value

DESCRIPTION = "Train a network. Without options this is the embedded default: a small ResNet on handwritten digits."


def main(argv: list[str]) -> int:
    """Run the command; return its exit code."""
    place, words = take_value(argv, "--restore-path")
    if place is not None:  # the reference's way to go on with a run
        from headrace.cli.resume import main as resume

        return resume([place, *words])
    resolved, _ = parse(argv, "headrace train", description=DESCRIPTION)
    from headrace.cli.outcome import exit_code, tell, tell_averages
    from headrace.job import join_job
    from headrace.run.fit import train

    with join_job(distributed=resolved.config.run.distributed) as place:
        result = train(resolved)
    tell(result)
    if place is None or place.is_first:
        tell_averages(result, resolved.config, validated=place is None)
    return exit_code(result)
