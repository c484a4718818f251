"""The source audit: Python read, not run. Values are followed from the config to where they take effect."""
