"""The presets of the entry points, as YAML."""
