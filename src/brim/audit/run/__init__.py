"""The run audit: what a ledger says about the run that wrote it."""
