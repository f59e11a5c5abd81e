"""One update by the calling code of a release of verl, with the losses of ``fspo.verl`` in it.

``python tests/unit/test_verl_releases.py [RELEASE...]`` prints the table release, path, loss, largest difference: of
the gradient to that of the library, divided by the largest. verl composes its own configuration and calls the loss
itself; only the forward pass (actors) or the unpadding (engines) is replaced. A release that is not installed stands
alone in a folder of ``FSPO_VERL_RELEASES`` (by default ``~/.cache/fspo-verl``).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

RELEASES = ("0.5.0", "0.6.0", "0.6.1", "0.7.0", "0.7.1", "0.8.0", "0.9.0", "0.9.1")
#: CI has the pinned release and an older one, with both of verl's paths; every night has all.
IN_CI = ("0.7.1", version("verl"))
#: What these import of transformers is not in transformers 5 any more.
BEFORE_TRANSFORMERS_5 = ("0.6.0", "0.6.1", "0.7.0")
#: Of a release, what calls the loss; in later ones the engine alone.
PATHS = {"0.5": ("actor",), "0.6": ("actor",), "0.7": ("actor", "engine")}
CACHE = Path(os.environ.get("FSPO_VERL_RELEASES") or "~/.cache/fspo-verl").expanduser()
_LOSS = "actor_rollout_ref.actor.policy_loss"
#: By name: overrides below ``policy_loss``.
LOSSES: dict[str, dict[str, Any]] = {
    "fspo": {"loss_mode": "fspo"},
    "fspo, c and factor": {"loss_mode": "fspo", "c_low": 0.055, "c_high": 0.04, "grad_multiplier": 4e-3},
    "seq_gspo, L^0.5": {"loss_mode": "seq_gspo", "exponent": 0.5, "c_low": 0.02, "c_high": 0.03},
    "seq_rloo": {"loss_mode": "seq_rloo"},
}


def folder_of(package: str, release: str) -> Path:
    """Where a release is installed, alone.

    Raises:
        CalledProcessError: If it cannot be downloaded.
    """
    folder = CACHE / f"{package}-{release}"
    if not folder.is_dir():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as temporary:
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", f"{temporary}/new"]
            subprocess.run([*pip, f"{package}=={release}"], check=True, capture_output=True, text=True, timeout=300)
            shutil.move(f"{temporary}/new", folder)
    return folder


def measured(release: str) -> list[dict[str, Any]]:
    """Rows of the table, each with ``path``, ``loss`` and ``difference``, or ``says`` where the loss raises."""
    folders = [] if release == version("verl") else [folder_of("verl", release)]
    if release in BEFORE_TRANSFORMERS_5:
        beside = {"transformers": "4.57.3", "huggingface-hub": "0.36.0", "datasets": "4.0.0"}
        folders += [folder_of(*one) for one in beside.items()]
    path = os.pathsep.join(map(str, [*folders, Path(__file__).resolve().parents[2]]))
    command = [sys.executable, "-W", "ignore", __file__, "--in-this-process", release]
    environment = os.environ | {"PYTHONPATH": path, "VERL_PLATFORM": "cpu"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def actor_config(loss: dict[str, Any]) -> Any:
    """The actor's configuration, from verl's own files, as a command with these overrides has it in a worker."""
    import verl
    from hydra import compose, initialize_config_dir
    from verl.utils.import_utils import import_external_libs

    words = {"loss_mode": f"{_LOSS}.loss_mode={loss['loss_mode']}"}
    words |= {key: f"+{_LOSS}.{key}={value}" for key, value in loss.items() if key != "loss_mode"}
    has_class = not verl.__version__.startswith("0.5.")
    if len(words) > 1 and has_class:
        words["class"] = f"{_LOSS}._target_=fspo.verl.SequencePolicyLossConfig"
    else:
        import_external_libs("fspo.verl")  # as the workers do for actor_rollout_ref.model.external_lib
    sizes = {"ppo_mini_batch_size": 8, "ppo_micro_batch_size_per_gpu": 4, "grad_clip": 1e9}
    words |= {key: f"actor_rollout_ref.actor.{key}={value}" for key, value in sizes.items()}
    with initialize_config_dir(str(Path(verl.__file__).parent / "trainer/config"), version_base=None):
        config = compose("ppo_trainer", [*words.values()]).actor_rollout_ref.actor
    if not has_class:
        return config
    from verl.utils.config import omega_conf_to_dataclass

    return omega_conf_to_dataclass(config)


def batch() -> dict[str, Any]:
    """Sixteen responses of 1 to 12 tokens, of which losses clip some; values in the padding."""
    import torch

    generator = torch.Generator().manual_seed(0)
    length_B = torch.tensor([12, 1, 7, 3, 9, 2, 12, 5, 4, 11, 6, 1, 10, 8, 2, 12])
    old_BT = -2 * torch.rand(16, 12, generator=generator) - 0.1
    step_B1 = torch.tensor([0.15, -0.15, 0.01, -0.01]).repeat(4)[:, None]
    noise_BT = 0.02 * torch.randn(16, 12, generator=generator)
    return {
        "responses": torch.arange(16)[:, None].expand(16, 12).contiguous(),
        "response_mask": (torch.arange(12) < length_B[:, None]).long(),
        "old_log_probs": old_BT,
        "log_probs": old_BT + step_B1 / length_B[:, None].sqrt() + noise_BT,
        "advantages": torch.randn(16, 1, generator=generator).expand(16, 12).contiguous(),
    }


def of_actor(config: Any) -> list[Any]:
    """The gradient of each of two mini-batches, by ``DataParallelPPOActor.update_policy``."""
    import torch
    import verl
    from verl import DataProto
    from verl.utils.profiler import performance
    from verl.workers.actor.dp_actor import DataParallelPPOActor

    columns, gradients = batch(), []
    model = torch.nn.Module()
    model.table = torch.nn.Parameter(columns.pop("log_probs"))

    class Optimizer(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            gradients.append(model.table.grad.clone())

    actor = DataParallelPPOActor(config, model, Optimizer(model.parameters(), lr=1.0))

    def forward(inputs: Any, *_: Any, **__: Any) -> Any:
        log_prob = model.table[inputs["responses"][:, 0]]
        by_name = tuple(map(int, verl.__version__.split(".")[:3])) >= (0, 7, 1)
        return {"log_probs": log_prob, "entropys": None} if by_name else (None, log_prob)

    actor._forward_micro_batch = forward
    performance._get_current_mem_info = lambda *_, **__: ("",) * 4  # 0.5.0 asks for that of a GPU
    columns |= {name: columns["responses"] for name in ("input_ids", "attention_mask", "position_ids")}
    actor.update_policy(DataProto.from_single_dict(columns, meta_info={"temperature": 1.0}))
    return gradients


def of_engine(config: Any) -> list[Any]:
    """The same by the engines' ``ppo_loss``, as one of two ranks, whose gradients verl averages."""
    from tensordict import NonTensorData, TensorDict
    from verl.workers.utils import losses

    for name in ("no_padding_2_padding", "_slice_response_from_unpad_output"):
        if hasattr(losses, name):
            setattr(losses, name, lambda tensor, data: tensor)
    columns, gradients = batch(), []
    for mini_batch in (range(8), range(8, 16)):
        table = columns["log_probs"].clone().requires_grad_()
        for rows in (list(mini_batch[:4]), list(mini_batch[4:])):
            data = TensorDict({name: columns[name][rows] for name in columns if name != "log_probs"}, batch_size=[4])
            tokens = int(columns["response_mask"].sum())
            for name, value in {"dp_size": 2, "global_batch_size": 16, "batch_num_tokens": tokens}.items():
                data[name] = NonTensorData(value)
            loss, _ = losses.ppo_loss(config, {"log_probs": table[rows]}, data)
            loss.backward()
        gradients.append(table.grad)
    return gradients


def of_library(loss: dict[str, Any]) -> list[Any]:
    """The same by the library."""
    import torch

    from fspo.losses import resolve_settings, sequence_policy_loss

    columns, gradients, settings = batch(), [], resolve_settings(loss)
    assert settings is not None
    for rows in (slice(8), slice(8, 16)):
        table = columns["log_probs"].clone().requires_grad_()
        names = ("old_log_probs", "advantages", "response_mask")
        output = sequence_policy_loss(table[rows], *(columns[name][rows] for name in names), settings)
        assert 0 < int((output.clipped_high_B | output.clipped_low_B).sum()) < 8
        gradients += torch.autograd.grad(output.loss_B.mean(), table)
    return gradients


def rows_here() -> list[dict[str, Any]]:
    """The rows of this process's release."""
    import torch
    import verl

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    rows: list[dict[str, Any]] = []
    for path in PATHS.get(verl.__version__[:3], ("engine",)):
        update = of_actor if path == "actor" else of_engine
        for name, loss in LOSSES.items():
            pairs = list(zip(update(actor_config(loss)), of_library(loss), strict=True))
            largest = max(float(expected.abs().max()) for _, expected in pairs)
            difference = max(float((got - expected).abs().max()) for got, expected in pairs) / largest
            rows.append({"path": path, "loss": name, "difference": difference})
        says = ""
        try:
            update(actor_config({"loss_mode": "fspo_v1"}))
        except ValueError as error:
            says = str(error)
        rows.append({"path": path, "loss": "fspo_v1", "says": says})
    return rows


@pytest.mark.slow
@pytest.mark.parametrize(
    "release",
    [pytest.param(release, marks=() if release in IN_CI else pytest.mark.nightly) for release in RELEASES],
)
def test_the_gradient_in_a_release_is_the_librarys(release: str) -> None:
    try:
        rows = measured(release)
    except subprocess.CalledProcessError as error:
        if "CI" in os.environ:
            raise
        pytest.skip(f"verl {release} cannot be downloaded: {error.stderr[-300:]}")
    assert len(rows) == len(PATHS.get(release[:3], ("engine",))) * (len(LOSSES) + 1)
    assert [row for row in rows if row.get("difference", 0) > 1e-7] == []
    says = {row["says"].partition(" needs a band that is measured")[0] for row in rows if "says" in row}
    assert says == {"actor_rollout_ref.actor.policy_loss.loss_mode=fspo_v1"}


def main(words: list[str]) -> None:
    """Command line."""
    if words[:1] == ["--in-this-process"]:
        import verl

        assert verl.__version__ == words[1], verl.__version__
        print(json.dumps(rows_here()))
        return
    print("| verl | path | loss | largest difference |\n| --- | --- | --- | --- |")
    for release in words or RELEASES:
        for row in measured(release):
            print(f"| {release} | {row['path']} | {row['loss']} | {row.get('difference', 'refused')} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
