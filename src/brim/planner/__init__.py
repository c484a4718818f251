"""Choose: search, the host's side, what the recipe should follow, reasons, files for other tools."""
