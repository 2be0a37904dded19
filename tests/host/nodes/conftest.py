"""Tiny Wan models of the real host in this process, and how a test patches and samples them."""

from __future__ import annotations

import functools
import importlib
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import tiny_models as makers
from family import SIZE, TOKENS  # noqa: F401, for the tests

HEADS = 2
LAYERS = 2
STEPS = 2

Model = Any  # comfy.model_patcher.ModelPatcher, which only exists once the host is loaded


@pytest.fixture(scope="session")
def rooms(pack: ModuleType) -> SimpleNamespace:
    """The pack's modules: host, attention, patch, report, probe."""
    names = ("host", "attention", "patch", "report", "probe")
    return SimpleNamespace(
        **{name: importlib.import_module(f"{pack.__name__}.nodes.{name}") for name in names}
    )


@pytest.fixture(scope="session")
def load(comfy: ModuleType) -> Callable[..., Model]:
    """Loads a fresh tiny model of a kind ("t2v", …) in fp32.

    more: weights beside its own. config: of the transformer, as files carry it in their metadata.
    """
    import comfy.sd

    torch.set_num_threads(1)  # such small matrices only lose by more

    def load(
        kind: str, more: dict[str, Tensor] | None = None, config: tuple[tuple[str, Any], ...] = ()
    ) -> Model:
        weights = makers.random_dit(kind, heads=HEADS, layers=LAYERS) | (more or {})
        options = {"dtype": torch.float32}
        metadata = {"config": json.dumps({"transformer": dict(config)})}
        model = comfy.sd.load_diffusion_model_state_dict(weights, options, metadata)
        # As UNETLoader leaves it: how to load the same weights once more.
        model.cached_patcher_init = (lambda *_, **__: load(kind, more, config), ())
        return model

    return load


@pytest.fixture(scope="session")
def models(load: Callable[..., Model]) -> Callable[[str], Model]:
    """The one tiny model of a kind that tests share; none of them may change its weights."""
    return functools.cache(load)


@pytest.fixture
def model(models: Callable[[str], Model]) -> Model:
    return models("t2v")


@pytest.fixture(scope="session")
def patch(rooms: SimpleNamespace) -> Callable[..., Model]:
    """Runs the patch node: half of the attention, at every step and length, unless told otherwise."""
    defaults = {
        "settings": "manual",
        "top_k": 0.03,
        "top_p": 0.2,
        "sparsity": 0.5,
        "start_percent": 0.0,
        "end_percent": 1.0,
        "dense_layers": "",
        "min_tokens": 0,
        "backend": "auto",
    }

    def patch(model: Model, **settings: Any) -> Model:
        return rooms.patch.SpargeAttention2Patch.execute(model, **{**defaults, **settings}).args[0]

    return patch


@pytest.fixture(scope="session")
def sample(comfy: ModuleType) -> Callable[..., Tensor]:
    """Runs a sampler: latents of `size` (frames, height, width), by default `TOKENS` tokens."""
    import comfy.sample
    import comfy.samplers

    text = [makers.text_embedding(seed) for seed in (0, 1)]

    def sample(
        model: Model,
        *,
        size: tuple[int, int, int] = SIZE,
        batch: int = 1,
        steps: int = STEPS,
        cfg: float = 3.0,
        seed: int = 7,
        noise: Tensor | None = None,
        latent: Tensor | None = None,
        cond: dict[str, Any] | None = None,
        noise_mask: Tensor | None = None,
        sampler: str = "euler",
        options: dict[str, Any] | None = None,
        callback: Callable[..., None] | None = None,
    ) -> Tensor:
        if latent is None:
            latent = torch.zeros(batch, model.model.latent_format.latent_channels, *size)
        noise = comfy.sample.prepare_noise(latent, seed) if noise is None else noise
        positive, negative = ([[embedding, dict(cond or {})]] for embedding in text)
        given = {"noise_mask": noise_mask, "callback": callback, "disable_pbar": True, "seed": seed}
        if sampler not in comfy.samplers.SAMPLER_NAMES:  # one that only a node of its own offers
            own = comfy.samplers.ksampler(sampler, options or {})
            schedule = model.get_model_object("model_sampling")
            sigmas = comfy.samplers.calculate_sigmas(schedule, "simple", steps)
            return comfy.sample.sample_custom(
                model, noise, cfg, own, sigmas, positive, negative, latent, **given
            )
        return comfy.sample.sample(
            model, noise, steps, cfg, sampler, "simple", positive, negative, latent, **given
        )

    return sample


@pytest.fixture(scope="session")
def account(rooms: SimpleNamespace) -> Callable[[Model], dict[str, Any]]:
    """What the latest run of a patched model did."""

    def account(model: Model) -> dict[str, Any]:
        attention = rooms.host.patch_of(model)
        return attention.account(attention.runs[-1])

    return account


# ----------------------------------------------------------------------------------------------------------
# Students


@pytest.fixture(scope="session")
def student(pack: ModuleType) -> ModuleType:
    return importlib.import_module(f"{pack.__name__}.nodes.student")


@pytest.fixture(scope="session")
def core(pack: ModuleType) -> ModuleType:
    return importlib.import_module(f"{pack.__name__}.sparge_core")


@pytest.fixture
def file(base: Path) -> Callable[..., str]:
    """Writes a file into a models folder and returns what the node calls it."""

    def write(
        tensors: dict[str, Tensor],
        name: str = "student.safetensors",
        metadata: dict[str, str] | None = None,
        folder: str = "diffusion_models",
    ) -> str:
        path = base / "models" / folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, path, metadata)
        return f"{folder}/{name}"

    return write


@pytest.fixture
def load_student(student: ModuleType) -> Callable[..., Model]:
    def load(file: str, base: Model | None = None) -> Model:
        return student.SpargeLoadStudent.execute(file, base).args[0]

    return load
