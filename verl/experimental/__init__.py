"""Import paths that plug-ins of this ecosystem use; what they lead to lives elsewhere."""
