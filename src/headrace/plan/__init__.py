"""The plan of a run: every number that follows from configuration, data and network, derived once, without a device."""
