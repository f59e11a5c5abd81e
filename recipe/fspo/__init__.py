"""The verl recipe: the thin glue that plugs the :mod:`fspo` library into verl 0.9.1.

Importing this package loads nothing heavy; its modules import verl, ray and hydra when they are used.
"""

#: The one verl release whose hooks this recipe is written against; checked at start (:mod:`recipe.fspo.launch.checks`).
SUPPORTED_VERL = "0.9.1"
