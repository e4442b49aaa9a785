"""The version of the package. A file of its own, so that code inside the package need not import `headrace` itself."""

__version__ = "0.1.0"
