"""What an earlier version had: refused on a command line with the remedy, left out where a run folder has it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from composing import composed
from hydra.errors import HydraException
from messages import holds
from omegaconf import OmegaConf
from test_run_folder import begun, ready

from recipe.fspo import job
from recipe.fspo.compare import __main__ as compare
from recipe.fspo.compare.__main__ import parse
from recipe.fspo.job import JOB, choices, compose
from recipe.fspo.removed import EARLIER_NAMES
from recipe.runner.launch.commands import BadInput
from recipe.runner.launch.removed import EarlierNames
from recipe.runner.launch.run_settings import changed_settings, with_settings_of_run
from recipe.runner.launch.values import PreflightError

DUAL = "actor_rollout_ref.actor.policy_loss.dual"


#: As a later version may have it.
LATER = dataclasses.replace(
    JOB,
    earlier_names=EarlierNames(
        removed={"fspo.diary": "use log", "algo=old": "use algo=fspo", "gone": "nothing", DUAL: "no more"},
        renamed={"scale": "mode", "fspo.clip": "seed"},
        modules=EARLIER_NAMES.modules,
    ),
)


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (job, compare):
        monkeypatch.setattr(module, "JOB", LATER)


def test_no_row_names_what_there_is_and_each_says_what_to_use() -> None:
    config, groups = composed(), {"algo", "advantage", "experiment", "mode"}
    for row, sentence in EARLIER_NAMES.removed.items():
        key, equals, option = row.partition("=")
        if equals:
            assert option not in choices(key), row
        else:
            assert OmegaConf.select(config, key) is None and key not in groups, row
        assert len(sentence) > 10 and not sentence.endswith("."), row
    for old, new in EARLIER_NAMES.renamed.items():
        assert OmegaConf.select(config, old) is None, old
        assert choices(new) or OmegaConf.select(config, new) is not None, new


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("algo=old", ("algo=old", "use algo=fspo")),
        ("fspo.diary=3", ("fspo.diary", "use log")),
        ("+fspo.diary=3", ("fspo.diary", "use log")),
        ("fspo.diary.pages=3", ("fspo.diary", "use log")),
        ("gone=1", ("gone", "nothing")),
        (f"{DUAL}=3", (DUAL, "no more")),
        ("scale=sync", ("scale", "mode=sync")),
    ],
)
def test_a_command_is_told_what_to_use(override: str, says: tuple[str, ...]) -> None:
    with pytest.raises(HydraException, match=holds(*says)):
        compose([override])
    with pytest.raises(BadInput, match=holds(*says)):
        parse(["algos=[old]"] if override == "algo=old" else [override])


def test_a_configuration_is_read_as_if_written_today() -> None:
    old = {"fspo": {"diary": {"pages": 3}, "clip": 7, "lre_bins": 8}, "gone": None, "scale": "sync"}
    old["engine"] = {"module": "recipe.fspo.cpu.checkpoint_engine", "reward": "recipe.fspo.reward"}
    values, left_out = LATER.earlier_names.current(old)
    assert values.pop("engine") == {"module": "recipe.runner.cpu.checkpoint_engine", "reward": "recipe.fspo.reward"}
    assert values == {"fspo": {"lre_bins": 8}, "seed": 7, "mode": "sync"}
    assert left_out == ["fspo.diary={'pages': 3}", "gone=None"]


def test_an_old_run_goes_on_without_what_was_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    begun(tmp_path, "+fspo.diary=3", "+scale=sync", "seed=7")
    arguments = with_settings_of_run([f"resume={tmp_path}"], LATER)
    assert "+mode=sync" in arguments and not any("diary" in argument for argument in arguments)
    assert capsys.readouterr().err.count("fspo.diary=3") == 1
    changed = changed_settings(ready(tmp_path, "seed=7"), LATER)
    assert [key for key, _, _ in changed] == ["mode"] and "fspo.diary=3" in capsys.readouterr().err


def test_a_loss_of_the_users_keeps_a_field_of_a_removed_name() -> None:
    for target, kept in (("recipe.fspo.config.SequencePolicyLossConfig", {}), ("mine.Settings", {"dual_clip": 3})):
        loss = {"_target_": target, "dual_clip": 3}
        values, _ = EARLIER_NAMES.current({"actor_rollout_ref": {"actor": {"policy_loss": loss}}})
        assert values["actor_rollout_ref"]["actor"]["policy_loss"] == {"_target_": target, **kept}


def test_a_run_of_a_removed_algorithm_does_not_go_on_as_another(tmp_path: Path) -> None:
    begun(tmp_path, "algo=gspo")
    later = dataclasses.replace(JOB, earlier_names=EarlierNames(removed={"algo=gspo": "use algo=luspo"}))
    with pytest.raises(PreflightError, match=holds("algo=gspo", "use algo=luspo")):
        with_settings_of_run([f"resume={tmp_path}"], later)
    assert with_settings_of_run([f"resume={tmp_path}", "algo=fspo"], later)[-1] == "algo=fspo"
