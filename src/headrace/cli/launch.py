"""`headrace launch` and `poprun`: start the processes of a job, here or on other hosts."""

import sys

from headrace.core.errors import HeadraceError

USAGE = """usage: headrace launch --num-instances I [--num-replicas R] [--ipus-per-replica P] [--host A,B] -- PROGRAM
       poprun [OPTIONS] python train.py ...

Start I processes of one job, each with R / I replicas of P devices. PROGRAM is a command of headrace with its options
(train --config NAME), or python with a script. On this host the processes are started and watched here; on others
mpirun or srun does it. When one dies, hangs or fails, all end.
"""


def main(argv: list[str], prog: str = "headrace launch") -> int:
    """Run the command; return its exit code."""
    from headrace.job import LAUNCH_OPTIONS, parse_launch_options

    if argv and argv[0] in ("-h", "--help"):
        print(USAGE)
        for row in LAUNCH_OPTIONS:
            if row.sets:
                print(f"  {row.name + ' ' + row.metavar:34}{row.help}")
        print(
            "\nAccepted and without effect here: " + ", ".join(row.name for row in LAUNCH_OPTIONS if not row.sets) + "."
        )
        return 0
    from headrace.job import launch

    return launch(parse_launch_options(argv, prog))


def poprun(argv: list[str] | None = None) -> int:
    """Run a line of poprun, as the reference's documents have them."""
    from headrace.cli.main import print_error

    try:
        return main(list(sys.argv[1:] if argv is None else argv), "poprun")
    except HeadraceError as error:
        print_error(error)
        return error.exit_code
