"""The HTML page, the live view, terminal charts: pure views of plan, measurement and ledger files."""
