"""The accounts of a step: ends by length, outcomes, metrics, records and the next band."""
