"""`headrace launch` and `poprun`: start the processes of a job, here or on other hosts."""

import textwrap

USAGE = """usage: headrace launch --num-processes N [--num-replicas R] [--host A,B] -- PROGRAM

Start N processes of one job, each with R / N replicas. PROGRAM is a command of
headrace with its options (train --config NAME), or python with a script. On
this host the processes are started and watched here; on others mpirun or srun
does it. When one dies, hangs or fails, all end.
"""


def launch(argv: list[str], prog: str = "headrace launch") -> int:
    """Run the command; return its exit code."""
    from headrace.job import LAUNCH_OPTIONS, parse_launch_options

    if argv and argv[0] in ("-h", "--help"):
        print(USAGE)
        for row in LAUNCH_OPTIONS:
            if row.sets:
                start, room = f"  {row.name} {row.metavar}", {"width": 80, "subsequent_indent": 31 * " "}
                print(textwrap.fill(f"{start:30} {row.help}", break_on_hyphens=False, **room))
        print("\n" + textwrap.fill(_poprun_names(), 80, break_on_hyphens=False))
        return 0
    from headrace.job import launch as start

    return start(parse_launch_options(argv, prog))


def _poprun_names() -> str:
    from headrace.job import LAUNCH_OPTIONS

    others = ", ".join(f"{row.also[0]} is {row.name}" for row in LAUNCH_OPTIONS if "--" in "".join(row.also))
    idle = ", ".join(row.name for row in LAUNCH_OPTIONS if not row.sets)
    return f"Command lines of poprun work as well: {others}; without effect here are {idle}."
