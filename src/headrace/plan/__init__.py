"""The plan of a run: every number that follows from options, dataset and network, derived once, without a device."""
