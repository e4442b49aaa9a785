"""Datasets from file to device: find and read them, decide the order of samples, augment, and feed the device loop."""
