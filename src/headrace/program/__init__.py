"""The programming interface for custom models: loops, feeds, pipelines, optax transforms, benchmarks."""
