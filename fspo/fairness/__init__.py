"""Length fairness: the error by length (`lre`), and bootstrap intervals (`bootstrap`), which need scipy."""
