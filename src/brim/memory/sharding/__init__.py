"""What data-parallel training does to the stream of one rank: a rewriting of it, without torch."""
