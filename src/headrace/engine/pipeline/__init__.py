"""Networks cut into stages: the programs of each stage, and the runner that launches them in a schedule's order."""
