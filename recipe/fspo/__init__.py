"""The verl recipe: the thin glue that plugs the :mod:`fspo` library into verl.

Importing this package loads nothing heavy; its modules import verl, ray and hydra when they are used.
"""
