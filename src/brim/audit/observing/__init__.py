"""brim's side of `brim observe`: run the command, read what its observers write, and say what batch was in force."""
