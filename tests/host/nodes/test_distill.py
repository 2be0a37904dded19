"""Samples and distillation inside ComfyUI: from a sampler's result to a student, with nothing left behind."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import tiny_models as makers

from .conftest import HEADS, LAYERS, Model

SIZE = (2, 16, 32)  # of the latent: 256 tokens, 2 blocks of queries and 4 of keys
SETTINGS = {
    **{"steps": 3, "batch": 1, "learning_rate": 1e-2, "rank": 4, "top_k": 0.0, "top_p": 0.2, "sparsity": 0.5},
    **{"held_out": 1, "save_every": 2, "checkpointing": True, "seed": 0},
}


@pytest.fixture(scope="session")
def core(pack: ModuleType) -> SimpleNamespace:
    """Modules of the pack that the tests look into."""
    names = ("nodes.distill", "nodes.samples", "nodes.training", "nodes.weights", "sparge_core.distill.data")
    names += ("sparge_core.distill", "sparge_core.distill.checkpoint", "sparge_core.distill.pair")
    modules = {name: importlib.import_module(f"{pack.__name__}.{name}") for name in names}
    return SimpleNamespace(**{name.rsplit(".", 1)[-1] + ("_core" * (name == "sparge_core.distill")): module
                              for name, module in modules.items()})  # fmt: skip


@pytest.fixture
def output(comfy: ModuleType, tmp_path: Path) -> Iterator[Path]:
    """ComfyUI's output folder for this test."""
    import folder_paths

    before = folder_paths.get_output_directory()
    folder_paths.set_output_directory(str(tmp_path))
    yield tmp_path
    folder_paths.set_output_directory(before)


def text(seed: int = 0, **options: Any) -> list[Any]:
    return [[makers.text_embedding(seed), options]]


def latents(count: int, seed: int = 0) -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(seed)
    return {"samples": torch.randn(count, makers.LATENT_CHANNELS, *SIZE, generator=source)}


@pytest.fixture
def save(core: SimpleNamespace, output: Path) -> Callable[..., Any]:
    """Runs the node that saves samples, and returns the data set."""

    def save(model: Model, positive: Any, latent: Any, folder: str = "clips", caption: str = "") -> Any:
        with torch.inference_mode():
            core.samples.SpargeSaveSample.execute(model, positive, latent, folder, caption)
        return core.data.open_dataset(output / folder)

    return save


def conditioning(kind: str) -> dict[str, Any]:
    """What an image-to-video node adds: the first frame's latent, and which frames are given."""
    if kind == "t2v":
        return {}
    source = torch.Generator().manual_seed(2)
    mask = torch.ones(1, 1, *SIZE)
    mask[:, :, :1] = 0.0
    seen = torch.randn(1, makers.CLIP_TOKENS, 1280, generator=source)
    return {
        "concat_latent_image": torch.randn(1, makers.LATENT_CHANNELS, *SIZE, generator=source),
        "concat_mask": mask,
        "clip_vision_output": SimpleNamespace(penultimate_hidden_states=seen),
    }


@pytest.mark.parametrize("kind", ["t2v", "i2v"])
def test_a_sample_holds_what_the_model_itself_was_given(
    kind: str, models: Callable[[str], Model], save: Callable[..., Any], sample: Callable[..., Tensor]
) -> None:
    """Compared with what reaches the diffusion model while ComfyUI samples."""
    model = models(kind).clone()
    seen: list[tuple[Tensor, Tensor, Any]] = []

    def watch(apply: Any, given: dict[str, Any]) -> Tensor:
        c = given["c"]
        row = given["cond_or_uncond"].index(0)  # of the positive conditioning
        seen.append(
            (c["c_crossattn"][row], c.get("c_concat", [None] * 9)[row], c.get("clip_fea", [None] * 9)[row])
        )
        out: Tensor = apply(given["input"], given["timestep"], **c)
        return out

    model.set_model_unet_function_wrapper(watch)
    options = conditioning(kind)
    latent = sample(model, size=SIZE, cond=options, steps=1)
    held = save(model, text(0, **options), {"samples": latent}, caption="a cat")
    read = held.read(0)
    words, concat, clip = seen[0]
    torch.testing.assert_close(read.text, words, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(read.latent, model.model.process_latent_in(latent)[0], rtol=2e-3, atol=2e-3)
    assert held.entries[0].caption == "a cat"
    if kind == "t2v":
        assert read.image_latent is read.image_embedding is None
    else:
        torch.testing.assert_close(read.image_latent, concat, rtol=2e-3, atol=2e-3)
        torch.testing.assert_close(read.image_embedding, clip, rtol=2e-3, atol=2e-3)


def test_every_video_of_a_batch_is_a_sample(model: Model, save: Callable[..., Any]) -> None:
    assert len(save(model, text(), latents(3))) == 3
    assert len(save(model, text(1), latents(1, seed=5))) == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"positive": [*text(0), *text(1)]}, "has 2 parts"),
        ({"positive": text(0, reference_latents=[torch.zeros(1, 16, 1, 16, 32)])}, "holds reference_latent"),
        ({"latent": {"samples": torch.zeros(1, 4, 16, 16)}}, r"The latent is \(1, 4, 16, 16\)"),
        ({"latent": {**latents(1), "noise_mask": torch.zeros(1)}}, "has a mask"),
        ({"folder": "../elsewhere"}, "is not inside ComfyUI's output folder"),
        ({"folder": ""}, "is not inside ComfyUI's output folder"),
    ],
)
def test_what_makes_no_sample_is_named(
    change: dict[str, Any], message: str, model: Model, save: Callable[..., Any], output: Path, core: Any
) -> None:
    with pytest.raises(core.distill_core.DistillError, match=message):
        save(**{"model": model, "positive": text(), "latent": latents(1), **change})
    assert not list(output.iterdir())


# ----------------------------------------------------------------------------------------------------------
# Distillation


@pytest.fixture
def teacher(base: Path, core: SimpleNamespace, comfy: ModuleType) -> Model:
    """A tiny model as ComfyUI's own loader gives it: one that can be loaded a second time."""
    import comfy.sd

    folder = base / "models" / "diffusion_models"
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "teacher.safetensors"
    if not file.is_file():
        weights = makers.random_dit("t2v", heads=HEADS, layers=LAYERS)
        for name in weights:
            if name.endswith("self_attn.norm_q.weight"):
                weights[name] *= 4  # sharp attention: with plain noise every block weighs the same
        save_file(weights, file)
    with torch.inference_mode():  # as in a graph
        return comfy.sd.load_diffusion_model(str(file), model_options={"dtype": torch.float32})


@pytest.fixture
def distill(core: SimpleNamespace, save: Callable[..., Any], teacher: Model) -> Callable[..., Any]:
    """Runs the node on four samples, as a graph does; returns its outputs."""
    save(teacher, text(), latents(4))

    def distill(model: Model = teacher, samples: str = "clips", name: str = "tiny", **settings: Any) -> Any:
        with torch.inference_mode():
            node = core.distill.SpargeDistillStudent
            return node.execute(model, samples, name, **{**SETTINGS, **settings}).args

    return distill


def velocity(model: Model, x: Tensor, t: float, words: Tensor) -> Tensor:
    import comfy.model_management

    comfy.model_management.load_models_gpu([model])
    with torch.inference_mode():
        clip = model.model.apply_model(x, torch.tensor([t]), c_crossattn=words)
    return (x - clip) / t


def test_a_distilled_student_loads_and_has_the_velocity_that_was_trained(
    distill: Callable[..., Any], teacher: Model, core: Any, output: Path, patch: Any, monkeypatch: Any
) -> None:
    trained: list[Tensor] = []
    x, words = torch.randn(1, 16, *SIZE, generator=torch.Generator().manual_seed(4)), makers.text_embedding(0)
    close = core.training.ComfyPair.close

    def spy(pair: Any) -> None:
        sample = core.data.Sample(x[0], words[0], None, None)
        with torch.no_grad():
            trained.append(pair.student(x, torch.tensor([0.5]), core.pair.Batch([sample], pair.device)))
        close(pair)

    monkeypatch.setattr(core.training.ComfyPair, "close", spy)
    model, file, image = distill(learning_rate=0.1)
    assert file == "loras/tiny.safetensors"
    assert (output / file).is_file()
    assert (output / "distillation" / "runs" / "tiny" / "log.jsonl").is_file()
    assert image.ndim == 4
    assert 0 <= float(image.min()) < float(image.max()) <= 1
    given = velocity(patch(model, settings="auto"), x, 0.5, words)
    torch.testing.assert_close(given, trained[0], rtol=0, atol=1e-2 * float(given.abs().max()))  # a bf16 file
    untrained = velocity(patch(teacher), x, 0.5, words)
    assert not torch.allclose(given, untrained, rtol=0, atol=2e-2 * float(given.abs().max()))


def test_training_brings_the_velocity_closer(distill: Callable[..., Any], output: Path) -> None:
    from sparge_core.distill.log import read_records

    distill(steps=16, batch=2, learning_rate=4e-3, rank=16, save_every=4)
    errors = [
        r["validation"]["error"] for r in read_records(output / "distillation/runs/tiny") if "validation" in r
    ]
    assert errors[-1] < 0.97 * errors[0]


def test_the_model_is_as_before_and_the_memory_is_handed_back(
    distill: Callable[..., Any], teacher: Model
) -> None:
    import gc
    import weakref

    import comfy.model_management

    x, words = torch.randn(1, 16, *SIZE), makers.text_embedding(0)
    before = velocity(teacher, x, 0.5, words)
    weights = sum(isinstance(one, torch.nn.Linear) for one in gc.get_objects())
    distill()
    gc.collect()
    assert torch.equal(velocity(teacher, x, 0.5, words), before)
    assert sum(isinstance(one, torch.nn.Linear) for one in gc.get_objects()) <= weights
    assert not comfy.model_management.in_training
    wan = teacher.model.diffusion_model
    assert not any(module._forward_hooks for module in wan.modules())
    assert weakref.ref(wan)() is wan


def interrupt_after(steps: int, core: Any, monkeypatch: Any) -> None:
    """Press stop in the middle of the step behind these."""
    import comfy.model_management

    calls = []
    original = core.training.ComfyPair.student

    def student(pair: Any, *arguments: Any) -> Tensor:
        if torch.is_grad_enabled():
            calls.append(1)
            if len(calls) > steps:
                comfy.model_management.interrupt_current_processing()
        return original(pair, *arguments)

    monkeypatch.setattr(core.training.ComfyPair, "student", student)


def test_a_stopped_run_saves_and_goes_on_to_the_same_student(
    distill: Callable[..., Any], core: Any, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import comfy.model_management

    distill(name="whole")
    with monkeypatch.context() as patched:
        interrupt_after(1, core, patched)
        with pytest.raises(comfy.model_management.InterruptProcessingException):
            distill(name="parts")
    runs = output / "distillation" / "runs"
    assert [step for step, _ in core.checkpoint.checkpoints(runs / "parts")] == [1]
    assert (output / "loras" / "parts.safetensors").is_file()
    assert not comfy.model_management.in_training
    distill(name="parts")
    whole, parts = (load_file(output / "loras" / f"{name}.safetensors") for name in ("whole", "parts"))
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[key], parts[key]) for key in whole)


def test_a_finished_run_gives_its_student_again(distill: Callable[..., Any], output: Path) -> None:
    distill()
    file = output / "loras" / "tiny.safetensors"
    first = load_file(file)
    file.unlink()
    distill()
    again = load_file(file)
    assert first.keys() == again.keys()
    assert all(torch.equal(first[key], again[key]) for key in first)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"samples": "absent"}, "has no manifest.json"),
        ({"name": "../x"}, 'The name "../x" may hold letters'),
        ({"held_out": 4}, "held_out is 4"),
        ({"rank": 0}, "rank is 0"),
    ],
)
def test_what_cannot_be_trained_is_named(
    change: dict[str, Any], message: str, distill: Callable[..., Any], core: Any, output: Path
) -> None:
    with pytest.raises(core.distill_core.DistillError, match=message):
        distill(**change)
    assert not (output / "loras").exists()


def test_models_that_are_not_plain_wan_or_cannot_be_loaded_twice_are_named(
    distill: Callable[..., Any], models: Callable[[str], Model], teacher: Model, core: Any
) -> None:
    with pytest.raises(core.distill_core.DistillError, match="this model is a VaceWanModel"):
        distill(models("vace"))
    lone = teacher.clone()
    lone.cached_patcher_init = None
    with pytest.raises(core.distill_core.DistillError, match="cannot be loaded a second time"):
        distill(lone)


def test_samples_of_another_kind_of_model_are_named(
    distill: Callable[..., Any], models: Callable[[str], Model], core: Any
) -> None:
    with pytest.raises(core.distill_core.DistillError, match="does not fit the base"):
        distill(models("i2v"))


def test_a_run_with_other_settings_is_not_gone_on_with(distill: Callable[..., Any], core: Any) -> None:
    distill()
    with pytest.raises(core.distill_core.DistillError, match=r"sparsity was 0\.5 and is 0\.25"):
        distill(sparsity=0.25)
