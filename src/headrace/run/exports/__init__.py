"""Trained networks in formats for elsewhere: a file for each row of `rows/exports.py`, and what they share."""
