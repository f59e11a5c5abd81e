"""What a step's responses and mini-batches add up to: ends by length, outcomes, metrics, records, the next band."""
