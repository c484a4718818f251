"""A plan as files that other tools run as they are, without brim: one small file per format."""
