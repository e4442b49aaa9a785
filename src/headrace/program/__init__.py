"""The programming interface for people with their own models: loops, feeds, pipelines, optax transforms, benchmarks."""
