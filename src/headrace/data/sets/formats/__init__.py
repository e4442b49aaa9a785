"""The formats of image sets: a file for each row of `rows/formats.py`."""
