"""Training on devices: state, step, device loop, forward pass; optimizers, learning rates, precision, loss scale."""
