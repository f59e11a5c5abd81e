"""FSPO as a library: losses, bands, calibration, fairness statistics, rewards, data, reports."""
