"""Length fairness: the error by length, with its interval."""
