"""``python -m recipe.fspo.main --help`` names what there is."""

from __future__ import annotations

import re

from recipe.fspo.launch.compose import CONF_DIR, compose
from recipe.fspo.main import usage


def test_every_choice_is_named_and_every_named_key_exists() -> None:
    text = usage()
    for group in ("algo", "experiment"):
        for path in (CONF_DIR / group).glob("*.yaml"):
            assert re.search(rf"\b{path.stem}\b", text), path
    keys = set(re.findall(r"((?:actor_rollout_ref|data|trainer|fspo)(?:\.\w+)+)=", text))
    assert len(keys) > 10
    config = compose()
    for key in keys:
        node = config
        for part in key.split("."):
            assert part in node, f"{key} is no key of the configuration"
            node = node[part]
