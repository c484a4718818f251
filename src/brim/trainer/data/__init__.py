"""From rows to tokens: what a data file holds is read once, checked, tokenised into a memory-mapped cache, and read from there."""
