"""`brim doctor` and `brim observe`: source, config, run and ledger."""
