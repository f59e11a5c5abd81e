"""The verl recipe: the thin glue that plugs the :mod:`fspo` library into verl.

Importing this package loads nothing heavy; its modules import verl, ray and hydra when they are used.
"""

from pathlib import Path
from typing import Final

_HERE = Path(__file__).resolve().parent
#: The shipped configuration: ``conf/`` of a checkout, which a wheel holds as ``recipe/fspo/conf/``.
CONF_DIR: Final = _HERE / "conf" if (_HERE / "conf").is_dir() else _HERE.parents[1] / "conf"
#: Values of ``trainer.v1.trainer_mode`` that name a trainer of this recipe.
TRAINER_MODES: Final = ("fspo", "fspo_colocate_async", "fspo_separate_async")
