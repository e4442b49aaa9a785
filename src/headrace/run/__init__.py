"""Whole runs: the values of a run, its directory, and fit, validate and bench on top of every other package."""
