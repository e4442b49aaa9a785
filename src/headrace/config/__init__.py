"""Configuration: one schema of options, YAML recipes, the command line, and where each value came from. No JAX here."""
