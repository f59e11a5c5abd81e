"""What may differ between runs that share one start of the stack."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from recipe.fspo.compose import compose
from recipe.fspo.preflight import PreflightError
from recipe.fspo.series import fixed_part, plan_later


def later(folder: Path, *overrides: str) -> Path:
    folder.mkdir(parents=True)
    path = folder / "overrides.yaml"
    path.write_text(yaml.safe_dump([*overrides, f"fspo.run_dir={folder}"]))
    return path


@pytest.mark.parametrize(
    "overrides",
    [
        ["algo=gspo", "seed=2"],
        ["algo=rloo"],
        ["algo=fspo_quantile", "advantage=shared", "grad_scale=matched"],
        ["actor_rollout_ref.actor.optim.lr=1e-5", "fspo.comparison=matched"],
    ],
)
def test_algorithm_seed_and_learning_rate_may_differ(tmp_path: Path, overrides: list[str]) -> None:
    config = compose([f"fspo.run_dir={tmp_path}", f"fspo.then=[{later(tmp_path / 'second', *overrides)}]"])
    ready = []
    plan_later(config, ready.append)
    assert len(ready) == 1
    (path,) = config.fspo.then
    planned = OmegaConf.load(path)
    assert planned.fspo.run_dir == str(tmp_path / "second")
    assert fixed_part(planned) == fixed_part(compose([*overrides, f"fspo.run_dir={tmp_path / 'second'}"]))


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("actor_rollout_ref.rollout.n=4", "actor_rollout_ref.rollout.n"),
        ("trainer.n_gpus_per_node=2", "trainer.n_gpus_per_node"),
        ("data.max_response_length=128", "data.max_response_length"),
    ],
)
def test_what_the_processes_were_started_with_may_not(tmp_path: Path, override: str, key: str) -> None:
    config = compose([f"fspo.run_dir={tmp_path}", f"fspo.then=[{later(tmp_path / 'second', override)}]"])
    with pytest.raises(PreflightError, match=key.replace(".", r"\.")):
        plan_later(config, lambda config: None)
    assert not (tmp_path / "second" / "config.yaml").exists()


def test_an_evaluation_has_nothing_after_it(tmp_path: Path) -> None:
    config = compose([f"fspo.run_dir={tmp_path}", "evaluate=true", f"fspo.then=[{later(tmp_path / 'second')}]"])
    with pytest.raises(PreflightError, match="exclude each other"):
        plan_later(config, lambda config: None)
