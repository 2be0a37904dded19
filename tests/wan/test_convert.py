"""From a student's file to what ComfyUI takes: the same numbers under other names, at no cost in memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sparge_core.wan import StudentError, check_base, convert_metadata, load_student, read_student

from .conftest import Save
from .files import Shapes, diffusers_name, image_model, low_rank, vace_model, wan_model, write_hollow

ROOT = Path(__file__).resolve().parents[2]
ATTENTION = {f"blocks.{i}.self_attn.{name}": (64, 64) for i in range(2) for name in "qkvo"}


@pytest.mark.parametrize(
    "shapes", [wan_model(), image_model(flf=True), vace_model()], ids=["t2v", "flf2v", "vace"]
)
@pytest.mark.parametrize(
    "rename", [str, diffusers_name, "module.model.{}._orig_mod".format], ids=["wan", "diffusers", "wrapped"]
)
def test_a_full_model_keeps_its_numbers_under_wans_names(
    save: Save, shapes: Shapes, rename: type[str]
) -> None:
    path = save({rename(key): shape for key, shape in shapes.items()})
    stored = load_file(path)
    tensors = load_student(path)[1]
    assert tensors.keys() == shapes.keys()
    for key, tensor in tensors.items():
        assert torch.equal(tensor, stored[rename(key)]), key


def test_patches_get_comfyuis_spelling(save: Save) -> None:
    content = {
        **low_rank({"transformer.blocks.0.attn1.to_q": (64, 64)}, ".lora_B.weight", ".lora_A.weight"),
        "transformer.blocks.0.attn1.to_q.alpha": (),
        "blocks.0.norm2.diff_b": (64,),
        "blocks.0.attn1.to_k.diff": (64, 64),
        "scale_shift_table.diff": (1, 2, 64),
        "blocks.1.scale_shift_table": (1, 6, 64),
        "blocks.1.attn1.norm_q.set_weight": (64,),
    }
    assert set(load_student(save(content))[1]) == {
        "diffusion_model.blocks.0.self_attn.q.lora_up.weight",
        "diffusion_model.blocks.0.self_attn.q.lora_down.weight",
        "diffusion_model.blocks.0.self_attn.q.alpha",
        "diffusion_model.blocks.0.norm3.bias.diff",
        "diffusion_model.blocks.0.self_attn.k.diff",
        "diffusion_model.head.modulation.diff",
        "diffusion_model.blocks.1.modulation.set_weight",
        "diffusion_model.blocks.1.self_attn.norm_q.set_weight",
    }


def test_the_alpha_of_peft_goes_to_pairs_without_their_own(save: Save) -> None:
    pairs = low_rank(ATTENTION, ".lora_B.weight", ".lora_A.weight")
    settings = json.dumps({"transformer.lora_alpha": 8})
    own = {"blocks.0.self_attn.q.alpha": torch.tensor(2.0)}
    tensors = load_student(save({**pairs, **own}, metadata={"lora_adapter_metadata": settings}))[1]
    alphas = {key: float(tensor) for key, tensor in tensors.items() if key.endswith(".alpha")}
    assert alphas.pop("diffusion_model.blocks.0.self_attn.q.alpha") == 2
    assert alphas == {
        f"diffusion_model.{module}.alpha": 8 for module in ATTENTION if module != "blocks.0.self_attn.q"
    }


def test_quantised_layers_are_named_as_the_weights_are(save: Save) -> None:
    layers = {"model.diffusion_model.blocks.0.attn1.to_q": {"format": "float8_e4m3fn"}}
    metadata = {
        "_quantization_metadata": json.dumps({"format_version": "1.0", "layers": layers}),
        "other": "x",
    }
    shapes = {f"model.diffusion_model.{diffusers_name(key)}": shape for key, shape in wan_model().items()}
    converted = convert_metadata(read_student(save(shapes, metadata=metadata)))
    assert converted.keys() == {"_quantization_metadata"}
    assert json.loads(converted["_quantization_metadata"]) == {
        "format_version": "1.0",
        "layers": {"blocks.0.self_attn.q": {"format": "float8_e4m3fn"}},
    }
    assert convert_metadata(read_student(save(shapes))) == {}


# ----------------------------------------------------------------------------------------------------------
# The base


def base_refusal(path: Path, base: Shapes) -> str:
    with pytest.raises(StudentError) as error:
        check_base(read_student(path), base)
    text = str(error.value)
    assert text.startswith(path.name)
    assert "; expected " in text
    assert "Connect the model that it was distilled from" in text
    return text


def test_a_base_that_has_all_parameters_fits(save: Save) -> None:
    pairs = low_rank({**ATTENTION, "blocks.0.ffn.0": (128, 64)}, ".lora_up.weight", ".lora_down.weight")
    content = {**pairs, "patch_embedding.diff": (64, 16, 1, 2, 2), "blocks.0.diff_m": (1, 6, 64)}
    check_base(read_student(save(content)), wan_model())


def test_low_rank_pairs_of_convolutions_fit(save: Save) -> None:
    pair = {
        "patch_embedding.lora_up.weight": (64, 4, 1, 1, 1),
        "patch_embedding.lora_down.weight": (4, 16, 1, 2, 2),
    }
    blocks = low_rank(ATTENTION, ".lora_up.weight", ".lora_down.weight")
    check_base(read_student(save({**pair, **blocks})), wan_model())
    wrong = pair | {"patch_embedding.lora_down.weight": (4, 36, 1, 2, 2)}
    assert "another shape" in base_refusal(save({**wrong, **blocks}), wan_model())


@pytest.mark.parametrize("ending", [".diff", ".set_weight"])
def test_a_diff_of_as_many_numbers_in_another_shape_does_not_fit(save: Save, ending: str) -> None:
    """ComfyUI would pass over it with a line in its log."""
    flat = {f"patch_embedding{ending}": (64, 64), f"blocks.0.self_attn.q{ending}": (64, 64)}
    assert "1 of its parameters have another shape" in base_refusal(save(flat), wan_model())


def test_a_base_of_another_size_is_named(save: Save) -> None:
    path = save(low_rank(ATTENTION, ".lora_up.weight", ".lora_down.weight"))
    text = base_refusal(path, wan_model(dim=1536, ffn=64, layers=30))
    assert "its base is Wan 1.3B (width 1536, 30 blocks)" in text
    assert "expected a base of Wan of no published size (width 64, 2 blocks)" in text
    assert "(width 64, 1 blocks)" in base_refusal(path, wan_model(layers=1))


def test_a_base_of_another_type_is_named_by_what_it_lacks(save: Save) -> None:
    pairs = low_rank(
        {**ATTENTION, "blocks.0.cross_attn.k_img": (64, 64)}, ".lora_up.weight", ".lora_down.weight"
    )
    path = save(pairs)
    check_base(read_student(path), image_model())
    text = base_refusal(path, wan_model())
    assert "1 of its parameters are not in its base (blocks.0.cross_attn.k_img.weight)" in text


def test_a_base_that_is_no_wan_model_is_refused(save: Save) -> None:
    path = save(low_rank(ATTENTION, ".lora_up.weight", ".lora_down.weight"))
    assert "no Wan model" in base_refusal(path, {"double_blocks.0.img_attn.qkv.weight": (4, 4)})


# ----------------------------------------------------------------------------------------------------------
# Memory

USE_ALL = """
import sys
import torch
from sparge_core.wan import load_student

def memory(field):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(field)) * 1024

torch.zeros(1000).sum()
anonymous, resident = memory("RssAnon"), memory("VmHWM")
student, tensors = load_student(sys.argv[1])
print(memory("RssAnon") - anonymous)
for tensor in tensors.values():
    tensor.view(torch.uint8)[..., ::64].count_nonzero()
print(memory("VmHWM") - resident)
"""


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="memory is read from Linux's /proc")
@pytest.mark.parametrize("dim", [640, pytest.param(5120, marks=pytest.mark.slow)])
def test_a_student_of_14b_shape_is_converted_on_the_disk_and_used_at_its_size(
    tmp_path: Path, dim: int
) -> None:
    """All proportions of Wan 14B, at an eighth of its width by default; in fp8, in diffusers' names."""
    shapes = wan_model(dim=dim, ffn=dim * 27 // 10, layers=40, text=4096, freq=256)
    renamed = {diffusers_name(key): shape for key, shape in shapes.items()}
    path = write_hollow(tmp_path / "student.safetensors", renamed, "F8_E4M3", 1)
    size = path.stat().st_size
    done = subprocess.run(
        [sys.executable, "-c", USE_ALL, path], cwd=ROOT, capture_output=True, text=True, check=True
    )
    converted, used = map(int, done.stdout.split())
    assert converted < 0.05 * size
    assert 0.9 * size < used < 1.15 * size
