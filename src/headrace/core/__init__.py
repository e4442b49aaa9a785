"""What all other rooms may use: errors, files, named trees, units, counter-based randomness. Imports no other room."""

__version__ = "0.1.0"  # here, where every room can see it, and equal to the one in pyproject.toml
