"""From training to ComfyUI: a student that was distilled headlessly has the same velocity there."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny_models as makers

from ...distill.conftest import make_model
from .conftest import HEADS, LAYERS, Model

SIZE = (2, 16, 32)  # of the latent: 256 tokens, 2 blocks of queries and 4 of keys
TIME = 0.6
WAN = {
    "num_attention_heads": HEADS,
    "attention_head_dim": makers.HEAD_DIM,
    "ffn_dim": 2 * HEADS * makers.HEAD_DIM,
    "num_layers": LAYERS,
    "text_dim": makers.TEXT_DIM,
    "freq_dim": 256,  # which ComfyUI fixes
}
IMAGE = {"in_channels": makers.IMAGE_IN_CHANNELS, "image_dim": 1280}
IMAGE["added_kv_proj_dim"] = HEADS * makers.HEAD_DIM


def sample(kind: str, seed: int) -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(seed)
    tensors = {
        "latent": torch.randn(makers.LATENT_CHANNELS, *SIZE, generator=source),
        "text": torch.randn(5, makers.TEXT_DIM, generator=source),
    }
    if kind == "i2v":
        channels = makers.IMAGE_IN_CHANNELS - makers.LATENT_CHANNELS
        tensors["image_latent"] = torch.randn(channels, *SIZE, generator=source)
        tensors["image_embedding"] = torch.randn(makers.CLIP_TOKENS, 1280, generator=source)
    return tensors


@pytest.fixture(scope="module")
def distill() -> ModuleType:
    return importlib.import_module("sparge_core.distill")


@pytest.fixture(scope="module")
def run(request: pytest.FixtureRequest, distill: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A finished run: its options, and a held-out sample."""
    from sparge_core.distill import cli, data, options

    kind, student = request.param.split("-")
    folder = tmp_path_factory.mktemp("distilled")
    model = make_model(folder / "base", **WAN, **(IMAGE if kind == "i2v" else {}))
    for seed in range(3):
        data.write_sample(folder / "data", sample(kind, seed))
    values = {
        **{"base": model, "data": folder / "data", "out": folder / "run", "student": student, "rank": 4},
        **{"alpha": 8.0, "top_k": 0.0, "sparsity": 0.5, "steps": 3, "batch": 1, "warmup": 0, "dtype": "fp32"},
        **{"learning_rate": 1e-2, "held_out": 1, "validation_timesteps": [TIME], "device": "cpu"},
        **{"tensorboard": False, "parameters": "all"},
    }
    chosen = options.options_from(values)
    flags = [part for name, value in values.items() for part in as_flag(name, value)]
    assert cli.main(["train", *flags]) == 0
    return chosen, sample(kind, 9)


def as_flag(name: str, value: Any) -> list[str]:
    flag = "--" + name.replace("_", "-")
    if isinstance(value, bool):
        return [flag if value else "--no-" + flag[2:]]
    return [flag, *map(str, value if isinstance(value, list) else [value])]


def headless_velocities(options: Any, tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Of the trained student and of its teacher."""
    from sparge_core.distill import checkpoint, data, loop, pair

    wan = pair.WanPair(options, torch.device("cpu"))
    run = loop.Distillation(options, wan, data.open_dataset(options.data))
    run.restore(checkpoint.find(options.out))
    x, t = x_t(tensors), torch.tensor([TIME])
    batch = pair.Batch([as_sample(tensors)], torch.device("cpu"))
    with torch.no_grad():
        return wan.student(x, t, batch), wan.teacher(x, t, batch)


def as_sample(tensors: dict[str, Tensor]) -> Any:
    from sparge_core.distill.data import Sample

    text = torch.nn.functional.pad(tensors["text"], (0, 0, 0, makers.TEXT_TOKENS - len(tensors["text"])))
    image = (tensors.get("image_latent"), tensors.get("image_embedding"))
    return Sample(tensors["latent"], text, *image)


def x_t(tensors: dict[str, Tensor]) -> Tensor:
    noise = torch.randn(tensors["latent"].shape, generator=torch.Generator().manual_seed(3))
    return ((1 - TIME) * tensors["latent"] + TIME * noise)[None]


def comfy_velocity(model: Model, tensors: dict[str, Tensor]) -> Tensor:
    """u of ComfyUI's own model: it returns the clip that it sees, x_0 = x_t - t u."""
    import comfy.model_management

    comfy.model_management.load_models_gpu([model])
    x, held = x_t(tensors), as_sample(tensors)
    more: dict[str, Any] = {}
    if held.image_latent is not None:
        more = {"c_concat": held.image_latent[None], "clip_fea": held.image_embedding[None]}
    with torch.inference_mode():
        clip = model.model.apply_model(x, torch.tensor([TIME]), c_crossattn=held.text[None], **more)
    return (x - clip) / TIME


@pytest.mark.parametrize(
    ("run", "kind"),
    [
        ("t2v-low_rank", "full"),
        ("t2v-low_rank", "diff"),
        ("t2v-low_rank", "low_rank"),
        ("t2v-full", "full"),
        ("t2v-full", "diff"),
        ("i2v-low_rank", "low_rank"),
    ],
    indirect=["run"],
)
def test_a_distilled_student_has_the_same_velocity_in_comfyui(
    kind: str, run: Any, base: Path, pack: ModuleType, patch: Callable[..., Model], comfy: ModuleType
) -> None:
    from sparge_core.distill.export import export

    node = importlib.import_module(f"{pack.__name__}.nodes.student").SpargeLoadStudent
    options, tensors = run
    folder = base / "models" / "loras"
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{options.out.parent.name}_{kind}.safetensors"
    export(options.out, file, kind, dtype="fp32")
    plain = None if kind == "full" else comfy_base(options)
    model = node.execute(f"loras/{file.name}", plain).args[0]
    patched = patch(model, settings="auto")

    student, teacher = headless_velocities(options, tensors)
    given = comfy_velocity(patched, tensors)
    close = {"rtol": 0, "atol": 2e-3 * float(student.abs().max())}
    torch.testing.assert_close(given, student, **close)
    # Neither the weights nor the sparsity are without effect, or the comparison would show nothing.
    assert not torch.allclose(given, teacher, **close)
    assert not torch.allclose(comfy_velocity(model, tensors), student, **close)


def comfy_base(options: Any) -> Model:
    """The run's base as ComfyUI loads it."""
    import comfy.sd
    from safetensors.torch import load_file

    from sparge_core.wan.keys import SCHEMES

    weights = {}
    for file in options.base.glob("*.safetensors"):
        for key, tensor in load_file(file).items():
            name = SCHEMES[1].parse(key)
            assert name is not None
            weights[name.target] = tensor
    return comfy.sd.load_diffusion_model_state_dict(weights, model_options={"dtype": torch.float32})
