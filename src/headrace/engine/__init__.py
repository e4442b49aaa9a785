"""Training on devices: state, step, device loop, evaluation; optimizers, curves, precision and loss scale."""
