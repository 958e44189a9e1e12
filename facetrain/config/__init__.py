"""Run configs: schema, loading, presets, and conversion from arcface_torch."""
