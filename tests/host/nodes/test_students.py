"""Students in the real ComfyUI: every kind and scheme gives the same result, and misfits are refused."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny_models as makers

from ...wan.files import diffusers_name, low_rank, random_tensors, wan_model
from .conftest import HEADS, LAYERS, Model

Weights = dict[str, Tensor]
Loader = Callable[..., Model]
Sample = Callable[..., Tensor]
DIM = HEADS * makers.HEAD_DIM
BRIEF = {"steps": 1, "cfg": 1.0}  # one call of the model: fp16, as these files run, is slow on a CPU


def distilled(kind: str = "t2v") -> Weights:
    return makers.random_dit(kind, heads=HEADS, layers=LAYERS, seed=5)


# ----------------------------------------------------------------------------------------------------------
# Full models


# As a student's title calls them.
TYPES = {
    "reference": "T2V",
    "control": "Fun control",
    "camera": "camera control",
    "camera_2.2": "camera control",
    "i2v_2.2": "I2V",
    "control_2.2": "Fun control",
    "ti2v": "TI2V",
    "s2v": "S2V",
    "humo_1.7B": "HuMo",
    "humo_17B": "HuMo",
    "animate": "Animate",
    "scail": "SCAIL",
    "scail2": "SCAIL 2",
    "wandancer": "WanDancer",
}
OTHERS = [kind for kind in makers.ARCHITECTURES if kind not in makers.KINDS]


@pytest.mark.parametrize(
    ("kind", "scheme"),
    [
        *((kind, scheme) for kind in makers.KINDS for scheme in ("wan", "diffusers", "wrapped")),
        *(
            (kind, "wrapped") for kind in OTHERS if kind not in ("animate", "humo_17B")
        ),  # large, and as the rest
    ],
)
def test_a_full_model_equals_what_comfyui_loads(
    kind: str, scheme: str, file: Callable[..., str], load_student: Loader, comfy: ModuleType
) -> None:
    import comfy.sd

    rename = {"wan": str, "diffusers": diffusers_name, "wrapped": "module.model._orig_mod.{}".format}[scheme]
    model = load_student(file({rename(key): weight for key, weight in distilled(kind).items()}))
    expected = comfy.sd.load_diffusion_model_state_dict(distilled(kind))
    assert type(model.model) is type(expected.model)
    ours, theirs = (one.model.diffusion_model.state_dict() for one in (model, expected))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_number_formats_keep_their_values(
    dtype: torch.dtype, file: Callable[..., str], load_student: Loader, sample: Sample, comfy: ModuleType
) -> None:
    import comfy.sd

    stored = {key: weight.to(dtype) for key, weight in distilled().items()}
    model = load_student(file({diffusers_name(key): weight for key, weight in stored.items()}))
    expected = comfy.sd.load_diffusion_model_state_dict(dict(stored))
    assert torch.equal(sample(model, **BRIEF), sample(expected, **BRIEF))


def scaled_fp8(plain: Weights, marks: str) -> Weights:
    """The linear layers of the blocks in fp8 at a scale of 1/4, marked in one of ComfyUI's two ways."""
    out: Weights = {}
    for key, weight in plain.items():
        if not (key.startswith("blocks.") and key.endswith(".weight") and weight.ndim == 2):
            out[key] = weight
            continue
        module = key.removesuffix(".weight")
        out[key] = (weight * 4).to(torch.float8_e4m3fn)
        out[f"{module}.{'scale_weight' if marks == 'scaled_fp8' else 'weight_scale'}"] = torch.tensor(0.25)
        if marks == "comfy_quant":
            settings = b'{"format": "float8_e4m3fn", "full_precision_matrix_mult": true}'
            out[f"{module}.comfy_quant"] = torch.tensor(list(settings), dtype=torch.uint8)
    if marks == "scaled_fp8":
        out["scaled_fp8"] = torch.zeros(2, dtype=torch.float8_e4m3fn)
    return out


@pytest.mark.parametrize("marks", ["scaled_fp8", "comfy_quant", "metadata"])
def test_scaled_fp8_keeps_its_scales(
    marks: str, file: Callable[..., str], load_student: Loader, sample: Sample, comfy: ModuleType
) -> None:
    import json

    import comfy.sd

    stored = scaled_fp8(distilled(), marks)
    rename = diffusers_name if marks != "scaled_fp8" else str
    modules = [key.removesuffix(".weight_scale") for key in stored if key.endswith(".weight_scale")]
    layers = {rename(f"{module}.")[:-1]: {"format": "float8_e4m3fn"} for module in modules}
    metadata = {"_quantization_metadata": json.dumps({"layers": layers})} if marks == "metadata" else None
    model = load_student(file({rename(key): weight for key, weight in stored.items()}, metadata=metadata))

    plain = {
        key: (weight.float() / 4).half()
        if weight.dtype == torch.float8_e4m3fn and key.endswith(".weight")
        else weight
        for key, weight in stored.items()
        if key in distilled()
    }
    expected = comfy.sd.load_diffusion_model_state_dict(plain)
    truth = sample(expected, **BRIEF)
    torch.testing.assert_close(sample(model, **BRIEF), truth, rtol=2e-2, atol=2e-2)
    assert not torch.allclose(truth, torch.zeros(1), atol=1e-2)


@pytest.mark.parametrize("kind", OTHERS)
def test_names_of_every_family_are_known(kind: str, comfy: ModuleType) -> None:
    from sparge_core.wan.keys import best_scheme, missing_parameters, model_type

    shapes = {key: like.shape for key, like in makers.empty_dit(kind, device="meta").state_dict().items()}
    names = best_scheme([f"model.diffusion_model.{key}" for key in shapes])[1]
    targets = {name.target for name in names.values()}
    assert targets == set(shapes)
    assert missing_parameters(targets) == []
    channels, out = shapes["patch_embedding.weight"][1], shapes["head.head.bias"][0]
    assert model_type(targets, channels, out) == TYPES[kind]


# ----------------------------------------------------------------------------------------------------------
# Diffs and low-rank files


@pytest.mark.parametrize("rename", [str, diffusers_name], ids=["wan", "diffusers"])
def test_a_diff_on_its_base_equals_the_full_model(
    rename: Callable[[str], str], file: Callable[..., str], load_student: Loader, load: Loader, sample: Sample
) -> None:
    base, full = makers.random_dit("t2v", heads=HEADS, layers=LAYERS), distilled()
    diffs = {f"{rename(key)}.diff": full[key].float() - base[key].float() for key in base}
    on = load("t2v")
    before = sample(on)
    student = load_student(file(diffs, folder="loras"), on)
    torch.testing.assert_close(sample(student), sample(load("t2v", full)), rtol=1e-3, atol=1e-3)
    assert torch.equal(sample(on), before)


@pytest.mark.parametrize("kind", ["vace", "camera", "s2v", "humo_1.7B", "scail2", "wandancer"])
def test_a_diff_reaches_every_parameter_of_a_family(
    kind: str, file: Callable[..., str], load_student: Loader, load: Loader
) -> None:
    base, full = makers.random_dit(kind, heads=HEADS, layers=LAYERS), distilled(kind)
    names = {key: key.removesuffix(".weight") for key in base}  # as files are written
    diffs = {f"{name}.diff": full[key].float() - base[key].float() for key, name in names.items()}
    student = load_student(file(diffs), load(kind))
    student.patch_model()
    weights = student.model.diffusion_model.state_dict()
    torch.testing.assert_close(
        {key: weights[key] for key in full}, {key: full[key].float() for key in full}, rtol=0, atol=2e-3
    )


def test_whole_parameters_are_set(
    file: Callable[..., str], load_student: Loader, load: Loader, sample: Sample
) -> None:
    full = distilled()
    ends = {
        f"diffusion_model.{key.removesuffix('.weight')}.set_weight": weight for key, weight in full.items()
    }
    student = load_student(file(ends), load("t2v"))
    assert torch.equal(sample(student), sample(load("t2v", full)))


LINEAR = {f"blocks.{i}.self_attn.{name}": (DIM, DIM) for i in range(LAYERS) for name in "qkvo"}
SPELLINGS = {
    "peft": (".lora_B.weight", ".lora_A.weight", "diffusion_model.{}".format),
    "peft default": (".lora_B.default.weight", ".lora_A.default.weight", "base_model.model.{}".format),
    "diffusers": (
        ".lora_B.weight",
        ".lora_A.weight",
        lambda name: f"transformer.{diffusers_name(name + '.')[:-1]}",
    ),
    "kohya": (".lora_up.weight", ".lora_down.weight", lambda name: "lora_unet_" + name.replace(".", "_")),
    "Fun": (".lora_up.weight", ".lora_down.weight", lambda name: "lora_unet__" + name.replace(".", "_")),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("alpha", [None, 2.0])
def test_low_rank_files_of_every_spelling_change_the_weights_as_they_should(
    spelling: str,
    alpha: float | None,
    file: Callable[..., str],
    load_student: Loader,
    load: Loader,
    sample: Sample,
) -> None:
    up, down, rename = SPELLINGS[spelling]
    rank = 4
    pairs = random_tensors(
        low_rank({rename(name): shape for name, shape in LINEAR.items()}, up, down, rank), torch.float32
    )
    scale = 1.0 if alpha is None else alpha / rank
    alphas = {} if alpha is None else {f"{rename(name)}.alpha": torch.tensor(alpha) for name in LINEAR}
    plain = makers.random_dit("t2v", heads=HEADS, layers=LAYERS)
    changed = {}
    for name in LINEAR:
        product = pairs[rename(name) + up] @ pairs[rename(name) + down] / 64
        pairs[rename(name) + up] /= 64
        changed[f"{name}.weight"] = plain[f"{name}.weight"].float() + scale * product

    on = load("t2v")
    before = sample(on)
    student = sample(load_student(file({**pairs, **alphas}, folder="loras"), on))
    torch.testing.assert_close(student, sample(load("t2v", changed)), rtol=1e-3, atol=1e-3)
    assert not torch.allclose(student, before, atol=1e-2)


@pytest.mark.parametrize("marks", ["scaled_fp8", "comfy_quant"])
def test_a_low_rank_file_and_a_diff_change_a_quantised_base(
    marks: str,
    file: Callable[..., str],
    load_student: Loader,
    load: Loader,
    sample: Sample,
    comfy: ModuleType,
) -> None:
    """As most people have the 14B model. What is added is rounded to fp8 again, so it is not exact."""
    import comfy.sd

    plain = makers.random_dit("t2v", heads=HEADS, layers=LAYERS)
    pairs = random_tensors(low_rank(LINEAR, ".lora_up.weight", ".lora_down.weight", 4), torch.float32)
    change = {}
    for name in LINEAR:
        pairs[f"{name}.lora_up.weight"] /= 16
        change[f"{name}.weight"] = pairs[f"{name}.lora_up.weight"] @ pairs[f"{name}.lora_down.weight"]
    for block in range(LAYERS):  # a parameter that is not quantised
        change[f"blocks.{block}.modulation"] = torch.full((1, 6, DIM), 0.5)
        pairs[f"blocks.{block}.modulation.diff"] = change[f"blocks.{block}.modulation"]
    changed = {key: plain[key].float() + change.get(key, 0) for key in plain}

    base = comfy.sd.load_diffusion_model_state_dict(scaled_fp8(plain, marks))
    before = sample(base, **BRIEF)
    student = sample(load_student(file(pairs, folder="loras"), base), **BRIEF)
    expected = sample(load("t2v", changed), **BRIEF)
    moved, off = (expected - before).abs().mean(), (expected - student).abs().mean()
    assert off < 0.25 * moved
    assert torch.equal(sample(base, **BRIEF), before)


# ----------------------------------------------------------------------------------------------------------
# Settings and warnings


def test_settings_travel_to_the_patch(
    file: Callable[..., str],
    load_student: Loader,
    patch: Loader,
    rooms: Any,
    core: ModuleType,
    sample: Sample,
) -> None:
    config = core.SparseConfig(top_k=0.5, top_p=0.4)
    patched = patch(load_student(file(distilled(), metadata=config.to_metadata())), settings="auto")
    assert rooms.host.patch_of(patched).settings.config == config
    assert rooms.host.student_file(patched) == "student.safetensors"
    sample(patched)


def test_a_student_without_settings_is_warned_of_on_auto_and_not_on_manual(
    file: Callable[..., str],
    load_student: Loader,
    patch: Loader,
    sample: Sample,
    rooms: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    student = load_student(file(distilled()))
    with caplog.at_level(logging.WARNING):
        manual = patch(student, settings="manual", sparsity=0.95)
        sample(manual)
        assert "SpargeAttention2" not in caplog.text
        assert not rooms.host.patch_of(manual).runs[-1].notes
        patch(student, settings="auto")
    assert "the student student.safetensors carries no settings" in caplog.text


def test_another_student_on_top_replaces_the_settings(
    file: Callable[..., str], load_student: Loader, rooms: Any, core: ModuleType
) -> None:
    first = load_student(file(distilled(), metadata=core.SparseConfig(0.5).to_metadata()))
    diff = {"blocks.0.norm3.diff": torch.ones(DIM)}
    second = load_student(file(diff, "second.safetensors"), first)
    assert rooms.host.student_config(second) is None
    assert rooms.host.student_file(second) == "second.safetensors"
    assert rooms.host.student_config(first) == core.SparseConfig(0.5)


def test_a_student_with_dense_attention_is_warned_of_once_a_run(
    file: Callable[..., str],
    load_student: Loader,
    patch: Loader,
    sample: Sample,
    caplog: pytest.LogCaptureFixture,
) -> None:
    student = load_student(file(distilled()))
    with caplog.at_level(logging.WARNING):
        sample(patch(student))
        assert "runs with dense attention" not in caplog.text
        sample(student.clone())
    assert caplog.text.count("student.safetensors runs with dense attention") == 1


def test_the_node_says_what_it_loaded_and_which_sliders_to_set(
    file: Callable[..., str], load_student: Loader, rooms: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []
    monkeypatch.setattr(rooms.host, "show_text", lambda node, text: shown.append(text))
    name = file(distilled())
    load_student(name, load_student(name))
    first, second = shown
    assert first.startswith("student.safetensors: full model of Wan T2V")
    assert "set the SpargeAttention2 node to manual" in first
    assert second.endswith("The base is not used: the file is a full model.")


def test_a_file_that_is_made_anew_is_loaded_anew(
    file: Callable[..., str], student: ModuleType, base: Path
) -> None:
    """ComfyUI runs a node again when this value changes, and keeps its output when it does not."""
    name = file({"blocks.0.norm3.diff": torch.ones(DIM)})
    path = base / "models" / name
    first = student.SpargeLoadStudent.fingerprint_inputs(name)
    assert student.SpargeLoadStudent.fingerprint_inputs(name) == first
    os.utime(path, (path.stat().st_atime, path.stat().st_mtime + 1))
    assert student.SpargeLoadStudent.fingerprint_inputs(name) != first


# ----------------------------------------------------------------------------------------------------------
# Misfits


@pytest.fixture
def refused(load_student: Loader) -> Callable[..., str]:
    def refused(file: str, base: Model | None = None) -> str:
        with pytest.raises(ValueError, match=file.split("/")[1]) as error:
            load_student(file, base)
        text = str(error.value)
        assert type(error.value).__name__ == "StudentError"
        assert "expected" in text
        assert "\n" not in text
        return text

    return refused


def test_a_patch_file_without_its_base_asks_for_it(
    file: Callable[..., str], refused: Callable[..., str]
) -> None:
    text = refused(file({"blocks.0.norm3.diff": torch.ones(DIM)}))
    assert "connect it to the input base" in text


def test_a_base_of_another_size_or_type_is_refused_and_left_alone(
    file: Callable[..., str], refused: Callable[..., str], models: Loader
) -> None:
    base = models("t2v")
    larger = file({"blocks.0.self_attn.q.diff": torch.ones(2 * DIM, 2 * DIM)})
    assert f"width {DIM}" in refused(larger, base)
    image = file(
        {
            "blocks.0.self_attn.q.diff": torch.ones(DIM, DIM),
            "blocks.0.cross_attn.k_img.diff": torch.ones(DIM, DIM),
        }
    )
    assert "not in its base" in refused(image, base)
    assert not base.patches
    assert not base.attachments


def test_a_full_model_that_comfyuis_does_not_match_is_one_error(
    file: Callable[..., str], refused: Callable[..., str]
) -> None:
    wrong = distilled() | {"text_embedding.0.weight": torch.zeros(DIM, 99)}
    assert "text_embedding.0.weight" in refused(file(wrong))
    camera = {"control_adapter.conv.weight": torch.zeros(DIM, 24 * 64, 2, 2)}
    family = distilled() | camera | {"patch_embedding.weight": torch.zeros(DIM, 36, 1, 2, 2)}
    assert "are missing" in refused(file(family))


def test_a_model_that_comfyui_cannot_build_is_one_error(
    file: Callable[..., str], refused: Callable[..., str]
) -> None:
    """Of a width below that of one head, ComfyUI makes a model of no heads."""
    text = refused(file(random_tensors(wan_model(text=4096, freq=256))))
    assert "ComfyUI cannot build a model from it" in text


@pytest.mark.parametrize(
    ("metadata", "mark", "found"),
    [
        ('{"layers": []}', None, "damaged metadata, _quantization_metadata; expected a Wan student"),
        ('{"layers": {"blocks.0.self_attn.q": 5}}', None, "ComfyUI cannot build a model from it"),
        (None, b"[]", "ComfyUI cannot build a model from it"),
    ],
    ids=["table", "layer", "key"],
)
def test_a_damaged_mark_of_quantisation_is_one_error(
    metadata: str | None,
    mark: bytes | None,
    found: str,
    file: Callable[..., str],
    refused: Callable[..., str],
) -> None:
    stored = scaled_fp8(distilled(), "comfy_quant")
    for key in [key for key in stored if key.endswith(".comfy_quant")]:
        if mark is None:
            del stored[key]
        else:
            stored[key] = torch.tensor(list(mark), dtype=torch.uint8)
    text = refused(file(stored, metadata=metadata and {"_quantization_metadata": metadata}))
    assert found in text
    assert text.count("expected") == 1


def test_a_base_that_was_compiled_takes_a_student(
    file: Callable[..., str], load_student: Loader, load: Loader, sample: Sample
) -> None:
    """Some nodes put torch.compile's wrapper in the model's place, which names the parameters otherwise."""
    diff = {
        "blocks.0.self_attn.q.diff": torch.randn(DIM, DIM, generator=torch.Generator().manual_seed(1)) / 8
    }
    name = file(diff, folder="loras")
    base = load("t2v")
    truth = sample(load_student(name, base))
    compiled = base.clone()
    wrapped = torch.compile(base.model.diffusion_model, backend="eager")
    compiled.add_object_patch("diffusion_model", wrapped)
    student = load_student(name, compiled)
    del student.object_patches["diffusion_model"]
    assert torch.equal(sample(student), truth)


def test_a_pickle_is_refused_without_being_opened(base: Path, refused: Callable[..., str]) -> None:
    path = base / "models" / "diffusion_models" / "student.pth"
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"blocks.0.self_attn.q.weight": torch.zeros(1)}, path)
    assert "not opened" in refused("diffusion_models/student.pth")
