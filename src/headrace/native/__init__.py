"""The C code of the input pipeline, compiled when the package is installed, and how it is found (`library.py`)."""
