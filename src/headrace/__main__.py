"""The commands' entrance, also `python -m headrace`: Ctrl-C is answered before anything that takes time is imported."""

import sys

from headrace.cli.ctrl_c import catch_ctrl_c

catch_ctrl_c()


def main() -> int:
    """Run `headrace` with the words of the command line; return the exit code."""
    from headrace.cli.main import main

    return main()


def poprun() -> int:
    """Run a line of poprun, as the reference's documents have them; return the exit code."""
    from headrace.cli.main import poprun

    return poprun()


def run_script(script: str) -> int:
    """Run a script of the reference by its name; return the exit code."""
    from headrace.cli.main import run_script

    return run_script(script)


if __name__ == "__main__":
    sys.exit(main())
