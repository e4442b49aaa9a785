"""Tests of the data room; a package, so that they can share small_sets."""
