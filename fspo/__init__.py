"""FSPO as a library: losses with their bands, clip values, the audit of any loss by length, reports."""
