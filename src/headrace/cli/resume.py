"""`headrace resume RUN_DIR`: go on with a run from its newest good checkpoint."""

import argparse
from pathlib import Path

from headrace.cli.options import read_words


def main(argv: list[str]) -> int:
    """Run the command; return its exit code."""

    def extra(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="directory of a run that was started before")

    words = read_words(argv, "headrace resume", extra, "Go on with a run from its newest good checkpoint, exactly.")
    from headrace.cli.outcome import exit_code, tell
    from headrace.job import join_job
    from headrace.run.fit import resume

    with join_job(distributed=bool(words.options.get("distributed"))):
        result = resume(words.own.run_dir, words.options)
    tell(result)
    return exit_code(result)
