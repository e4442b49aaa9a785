"""The reference's two applications: their options, defaults, scripts and named configurations, translated to ours."""
