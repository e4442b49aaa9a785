"""Fuzzing of the readers of files from elsewhere. `python -m tests.fuzz SECONDS [SEED]` runs for a time."""
