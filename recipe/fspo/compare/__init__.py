"""``python -m recipe.fspo.compare``: algorithms by seeds under equal conditions."""
