"""Datasets on the disk: where they are, how each layout is read, and one split as images by sample number."""
