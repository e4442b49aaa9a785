"""From a split to the device: the order of samples, blocks prepared ahead, and what stays on the device."""
