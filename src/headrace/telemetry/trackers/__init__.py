"""Trackers: a file for each row of `rows/trackers.py`, and what sends them the records of a run."""
