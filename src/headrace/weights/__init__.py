"""Weights from elsewhere and back: files of other libraries, names as rows of tables, exported graphs."""
