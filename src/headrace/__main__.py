"""The commands' entrance, also `python -m headrace`: Ctrl-C is answered before anything that takes time is imported."""

import sys

from headrace.cli.ctrl_c import catch_ctrl_c

catch_ctrl_c()

# What pyproject.toml requires, under the names that are imported.
NEEDED = (
    "jax", "jaxlib", "ml_dtypes", "numpy", "optax", "yaml", "safetensors", "PIL", "rich", "simplejpeg", "flatbuffers",
)  # fmt: skip
TYPE_CHECKING = False  # for type checkers, as in typing, which takes longer to import than all of this
if TYPE_CHECKING:
    from collections.abc import Callable


def main() -> int:
    """Run `headrace` with the words of the command line; return the exit code."""

    def run() -> int:
        from headrace.cli.main import main

        return main()

    return with_packages(run)


def poprun() -> int:
    """Run a line of poprun, as the reference's documents have them; return the exit code."""

    def run() -> int:
        from headrace.cli.main import poprun

        return poprun()

    return with_packages(run)


def run_script(script: str) -> int:
    """Run a script of another application, which an installed package translates; return the exit code."""

    def run() -> int:
        from headrace.cli.main import run_script

        return run_script(script)

    return with_packages(run)


def with_packages(run: "Callable[[], int]") -> int:
    """Run a command; say what to install where a package that Headrace needs is missing, as in a mere clone."""
    from headrace.core.bytecode import keep_bytecode

    keep_bytecode("headrace")
    try:
        code = run()
        from headrace.core.process import leave_process

        leave_process(code)
        return code
    except ModuleNotFoundError as error:
        from importlib.util import find_spec

        missing = [name for name in NEEDED if find_spec(name) is None]
        if error.name not in missing:
            raise
        print(
            f"headrace: Not installed for {sys.executable}: {', '.join(missing)}.\n"
            "  rule: Headrace needs these packages; a clone does not bring them.\n"
            f"  remedy: {sys.executable} -m pip install -r requirements.txt, in the clone.",
            file=sys.stderr,
        )
        return 2


if __name__ == "__main__":
    sys.exit(main())
