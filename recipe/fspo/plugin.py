"""Loaded by verl in every process that imports it, through the ``verl.plugins`` entry point.

Selects nothing and starts nothing: it makes the CPU platform known where ``VERL_PLATFORM=cpu`` (never on a GPU run)
and adds the sequence-level losses to verl's registry. verl logs a plugin's import error at DEBUG only, so the processes
that cannot do without it call :func:`require_plugin`.
"""

from __future__ import annotations

import os

_loaded = False


def require_plugin() -> None:
    """Fail loudly where verl did not load this plugin.

    Raises:
        RuntimeError: if the entry point was disabled, or its import failed (verl hides that error).
    """
    if not _loaded:
        raise RuntimeError(
            "verl did not load the plugin 'fspo' in this process: VERL_USE_EXTERNAL_PLUGINS="
            f"{os.environ.get('VERL_USE_EXTERNAL_PLUGINS', 'auto')!r}. Set it to 'auto' (or add 'fspo'), install this "
            "package on every node, and run `python -c 'import verl, recipe.fspo.policy_loss'` to see the import error."
        )


if os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu":
    import recipe.fspo.cpu.platform  # registers the platform
    from recipe.fspo.cpu.patches import merge_duplicate_process_group_backend, report_vllm_version

    merge_duplicate_process_group_backend()
    report_vllm_version()

import recipe.fspo.policy_loss  # noqa: E402, F401  (registers the losses; after the platform, which its imports query)

_loaded = True
