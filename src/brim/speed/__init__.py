"""How many seconds: flops and bytes of the same trace, roofline, calibration by measurement."""
