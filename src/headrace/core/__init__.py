"""What all other packages may use: errors, files, named trees, units, counter-based randomness. Imports no other."""

__version__ = "0.1.0"  # here, where every package can import it, and equal to the one in pyproject.toml
