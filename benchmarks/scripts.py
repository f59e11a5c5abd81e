"""``python -m benchmarks.scripts CHECKOUT``: what the recipe says to the launch scripts of a checkout of verl.

bash itself runs each script that starts ``main_ppo``, in a copy of the checkout, without a network, and with a PATH on
which every program but a few that only read and print is a stub: quoting, arrays and defaults are bash's own. The
arguments are then composed and checked as ``dry_run=true`` does, all in one process.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from fspo.files import atomic_path
from fspo.markdown import markdown_table
from recipe.fspo.job import JOB
from recipe.runner.launch.without_effect import ROWS

#: Programs that scripts compute their arguments with.
_REAL: Final = "basename cat cut date dirname expr getopt grep head printf pwd realpath sed seq sort tail tr uname wc"
#: Programs that a script may start python with, by a way that bash looks up on PATH alone.
_STARTERS: Final = "python python3 ray torchrun srun uv env nohup exec timeout tee mkdir rm cp pip nvidia-smi"
#: A stub: keeps its words if they start training, and prints nothing.
_STUB: Final = """for word in "$@"; do
    if [[ $word == *main_ppo || $word == *main_dapo || $word == *main_ppo.py ]]; then
        printf '%s\\0' "$0" "$@" $'\\n' >> "$CALLS"
        break
    fi
done
"""
_SECONDS: Final = 20
_TRAINS: Final = re.compile(r"\bmain_(?:ppo|dapo)\b")
_MODULE: Final = re.compile(r"(?:.*[./])?main_(?:ppo|dapo)(?:\.py)?$")


#: The page that shows the table of keys without effect, between these lines.
PAGE: Final = Path(__file__).resolve().parents[1] / "docs" / "runs.md"
_TABLE: Final = re.compile(r"(?<=<!-- python -m benchmarks.scripts --write -->\n).*?(?=<!-- end -->)", re.S)


def with_table(page: str) -> str:
    """The page with the table of keys without effect as the program has it."""
    rows = [
        [
            ", ".join(f"`{key}`" for key in row.keys),
            f"`{row.switch}`: {row.when}" if row.switch else "always",
            row.becomes,
            row.remedy,
        ]
        for row in (*JOB.without_effect(), *ROWS)
    ]
    return _TABLE.sub(
        lambda _: markdown_table(["given", "no effect because of", "", "why, or instead"], rows) + "\n", page
    )


def scripts(checkout: Path) -> list[Path]:
    """The scripts that start training."""
    return sorted(path for path in checkout.rglob("*.sh") if _TRAINS.search(path.read_text(errors="replace")))


def arguments(checkout: Path, paths: Sequence[Path]) -> Iterator[tuple[Path, list[str]]]:
    """Each script with the arguments of its first start of training; none if it makes no such start."""
    with tempfile.TemporaryDirectory() as folder:
        stubs, home, copy = Path(folder) / "bin", Path(folder) / "home", Path(folder) / "copy"
        stubs.mkdir()
        home.mkdir()
        shutil.copytree(checkout, copy, symlinks=True, ignore=shutil.ignore_patterns(".git"))
        for name in _REAL.split():
            if program := shutil.which(name):
                (stubs / name).symlink_to(program)
        for name in _STARTERS.split():
            (stubs / name).write_text(f"#!/bin/bash\n{_STUB}", encoding="utf-8")
            (stubs / name).chmod(0o755)
        calls = Path(folder) / "calls"
        environment = {
            "PATH": str(stubs),
            "HOME": str(home),
            "CALLS": str(calls),
            "USER": "user",
            # bash calls it for every other program.
            "BASH_FUNC_command_not_found_handle%%": f"() {{ {_STUB} }}",
        }
        for path in paths:
            calls.unlink(missing_ok=True)
            words = [shutil.which("unshare") or "unshare", "-rn", "/bin/bash", str(path.relative_to(checkout))]
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run(words, cwd=copy, env=environment, capture_output=True, timeout=_SECONDS, check=False)
            starts = calls.read_text(errors="replace").split("\0\n\0") if calls.exists() else [""]
            start = starts[0].split("\0")
            first = next((i for i, word in enumerate(start) if _MODULE.match(word)), len(start))
            yield path, start[first + 1 :]


def main() -> None:
    """Parse the command line; with ``--write`` renew the table of the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scripts", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the table of keys without effect into docs/runs.md")
    parser.parse_args()
    with atomic_path(PAGE) as temporary:
        temporary.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
