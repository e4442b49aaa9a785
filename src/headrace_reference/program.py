"""The scripts of the reference as programs: as little as possible is imported before Ctrl-C is answered."""

from headrace.__main__ import with_packages


def run_script(script: str) -> int:
    """Run a script of the reference by its name, also where the package is not installed; return the exit code."""

    def run() -> int:
        import headrace.config.yaml_blocks  # noqa: F401 (needs PyYAML: a mere clone says so before anything else)
        from headrace.cli.main import run_script
        from headrace.config.translations import use
        from headrace_reference.entrance import REFERENCE

        use(REFERENCE)
        return run_script(script)

    return with_packages(run)
