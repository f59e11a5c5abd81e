"""The programs behind the pages: figures, the card of the recordings, losses of verl and of other code bases."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from importlib import metadata
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from messages import unpadded

from benchmarks import code_bases, losses, public_losses, versus_verl
from benchmarks.checkouts import Source, not_run
from benchmarks.pages import STUDY, read_table
from benchmarks.studies import figures
from fspo.audit import read_audit
from fspo.check_loss import PolicyLoss, configured, load
from fspo.check_loss.by_length import normalisation

ROOT = Path(__file__).resolve().parents[2]


def test_start_up_and_steps_come_from_verls_log_and_the_table_has_the_recipes_share() -> None:
    entries = [{"step": i, "data": {"timing_s/step": 3.0 + i}} for i in (1, 2, 3)]
    # verl's timer of the first step: 4 s; the others from line to line
    assert versus_verl.step_times(entries, [100.0, 106.0, 113.5]) == {
        "first_step_begins_s": 96.0,
        "first_step_ends_s": 100.0,
        "step_s": 6.75,
    }
    names = ("first_step_begins_s", "first_step_ends_s", "step_s", "peak_pss_mib")
    rows = [{"variant": v, **dict.fromkeys(names, s)} for v, s in (("verl", 10), ("verl", 30), ("recipe", 5))]
    assert "| step, s | 20.0 (10.0 to 30.0) | 5.0 (5.0 to 5.0) | 0.25 |" in unpadded(versus_verl.table(rows))


def test_the_readmes_figure_has_the_lres_of_the_readmes_audit() -> None:
    axes = Figure().subplots()
    figures.clip_by_length(axes, read_audit(STUDY / "demo.parquet").responses.moved())
    shown = [bars.get_label() for bars in axes.containers]
    (line,) = re.findall(r"^\| LRE +\|  .*", (ROOT / "README.md").read_text(encoding="utf-8"), re.M)
    found = re.findall(r"\d\.\d{3} \[\d\.\d{3}, \d\.\d{3}\]", line)
    assert shown == [f"{name}: LRE {lre}" for lre, name in zip(found, figures.BANDS.values(), strict=True)]


def test_ten_lines_of_the_card_judge_a_band_of_ones_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """L^0.5 has the LRE of FSPO's band in docs/results.md, which clock is right."""
    monkeypatch.chdir(ROOT)
    (block,) = re.findall(r"```python\n(.*?)```", (STUDY / "README.md").read_text(encoding="utf-8"), re.S)
    for power, low, high in (("0.4", 0.0, 0.03), ("0.5", 0.039, 0.045), ("1.0", 0.08, 0.2)):
        exec(block.replace("L**0.4", f"L**{power}"), {})
        (value,) = re.findall(r"^Interval\(value=([\d.]+), low", capsys.readouterr().out)
        assert low <= float(value) < high


def test_the_table_of_losses_has_every_loss_and_is_made_of_them() -> None:
    known = losses.known()
    heads, *rows = read_table("check-losses")
    assert [row[0] for row in rows] == [*known]
    some = {name: known[name] for name in ("gspo", "geo_mean")}
    assert losses.table_of_losses(some) == [heads, *(row for name in some for row in rows if row[0] == name)]


def test_functions_of_a_checkout_run_without_their_package(tmp_path: Path) -> None:
    source = "import a_package_that_is_not_there\n\n@a_package_that_is_not_there.mark\ndef f(x: No.Such) -> Tensor:\n"
    source += (
        "    return torch.full((2,), x + more)\n\nclass A(Absent):\n    def g(self):\n        return math.exp(self)\n"
    )
    (tmp_path / "losses.py").write_text(source, encoding="utf-8")
    author = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    for arguments in (("init", "-q"), ("add", "."), (*author, "commit", "-qm", "x")):
        subprocess.run(["git", "-C", str(tmp_path), *arguments], check=True)
    checkout = Source(tmp_path)
    assert checkout.holds("losses.py") and not checkout.holds("other.py") and len(checkout.version("any")[1]) == 10
    assert checkout.definitions("losses.py", ("f",), {"more": 2}).f(1).tolist() == [3, 3]
    assert checkout.definitions("losses.py", ("A.g",)).g(0) == 1
    with pytest.raises(SystemExit, match=r"losses\.py.* has no A\.f, g"):
        checkout.definitions("losses.py", ("A.g", "A.f", "g"))
    with pytest.raises(SystemExit, match="prime-rl"):
        public_losses.table([tmp_path])


def test_verls_release_is_read_where_it_is_installed_and_its_gspo_follows_the_averaging() -> None:
    spec = importlib.util.find_spec("verl")
    assert spec is not None and spec.origin is not None
    release = Source(Path(spec.origin).parents[1])
    path = code_bases.CODE_BASES["verl"][0]
    assert release.holds(path) and release.version("verl") == (metadata.version("verl"), "installed")
    gspo = next(code_bases.verl(release))
    config = configured([f"{key}={value}" for key, value in gspo.settings.items()])
    assert normalisation(PolicyLoss(gspo.loss, config))[1] == pytest.approx(0, abs=0.01)
    assert normalisation(PolicyLoss(gspo.loss, config, "seq-mean-token-mean"))[1] == pytest.approx(-1, abs=0.01)


def test_a_loss_that_cannot_run_has_a_row_that_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fake-1.0.dist-info").mkdir()
    (tmp_path / "fake.py").touch()
    monkeypatch.setattr(
        public_losses, "CODE_BASES", {"Fake": ("fake.py", lambda source: [not_run("paired", "needs pairs")])}
    )
    heads, row = public_losses.table([tmp_path])
    assert row[:6] == ["Fake", "1.0", "installed", "paired", "-", "not run: needs pairs"] and len(row) == len(heads)


def test_a_row_says_which_named_loss_it_equals() -> None:
    gspo = load("gspo")
    twice = PolicyLoss(lambda **arguments: 2 * gspo.function(**arguments), gspo.config)
    assert [public_losses.equal_to(loss) for loss in (gspo, twice)] == ["GSPO", "-"]
