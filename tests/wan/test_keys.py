"""Names of parameters: every scheme's lead to Wan's, and no other name does."""

from __future__ import annotations

import pytest

from sparge_core.wan.keys import SCHEMES, Name, Role, best_scheme, missing_parameters, model_type, strip

from .files import Shapes, diffusers_name, image_model, vace_model, wan_model

FAMILIES = {"t2v": wan_model(), "i2v": image_model(), "flf2v": image_model(flf=True), "vace": vace_model()}


@pytest.mark.parametrize("shapes", FAMILIES.values(), ids=FAMILIES)
def test_wans_names_mean_themselves(shapes: Shapes) -> None:
    scheme, names = best_scheme(shapes)
    assert scheme.name == "Wan"
    assert names == {key: Name(key, Role.VALUE) for key in shapes}


@pytest.mark.parametrize("shapes", FAMILIES.values(), ids=FAMILIES)
def test_diffusers_names_mean_wans(shapes: Shapes) -> None:
    scheme, names = best_scheme([diffusers_name(key) for key in shapes])
    assert scheme.name == "diffusers"
    assert names == {diffusers_name(key): Name(key, Role.VALUE) for key in shapes}


@pytest.mark.parametrize("shapes", FAMILIES.values(), ids=FAMILIES)
def test_a_complete_model_misses_nothing_and_each_parameter_is_missed(shapes: Shapes) -> None:
    optional = {"img_emb.emb_pos"}
    assert missing_parameters(list(shapes)) == []
    for key in shapes.keys() - optional:
        assert key in missing_parameters(list(shapes.keys() - {key})), key


@pytest.mark.parametrize(
    "around",
    [
        "{}",
        "model.{}",
        "diffusion_model.{}",
        "model.diffusion_model.{}",
        "module.{}",
        "model.module.{}",
        "_orig_mod.{}",
        "transformer.{}",
        "base_model.model.{}",
        "_fsdp_wrapped_module.{}",
    ],
)
def test_prefixes_do_not_matter(around: str) -> None:
    for key in FAMILIES["t2v"]:
        assert strip(around.format(key)) == key


@pytest.mark.parametrize(
    "wrapper", ["_checkpoint_wrapped_module", "_orig_mod", "module", "_fsdp_wrapped_module"]
)
def test_wrappers_do_not_matter_wherever_they_stand(wrapper: str) -> None:
    for key in FAMILIES["i2v"]:
        parts = key.split(".")
        for i in range(len(parts)):
            assert strip(".".join([*parts[:i], wrapper, *parts[i:]])) == key


Q, OUT, MODULATION = "blocks.7.self_attn.q.weight", "blocks.7.self_attn.o.weight", "blocks.7.modulation"


@pytest.mark.parametrize(
    ("key", "target", "role"),
    [
        ("diffusion_model.blocks.7.self_attn.q.lora_A.weight", Q, Role.DOWN),
        ("diffusion_model.blocks.7.self_attn.q.lora_B.weight", Q, Role.UP),
        ("base_model.model.blocks.7.self_attn.q.lora_A.default.weight", Q, Role.DOWN),
        ("base_model.model.blocks.7.self_attn.q.lora_B.student.weight", Q, Role.UP),
        ("blocks.7.self_attn.q.lora_A", Q, Role.DOWN),
        ("blocks.7.self_attn.q.lora_up.weight", Q, Role.UP),
        ("blocks.7.self_attn.q.lora_down.weight", Q, Role.DOWN),
        ("blocks.7.self_attn.q.lora.up.weight", Q, Role.UP),
        ("blocks.7.self_attn.q.lora_linear_layer.down.weight", Q, Role.DOWN),
        ("transformer.blocks.7.attn1.to_q.lora_A.weight", Q, Role.DOWN),
        ("transformer.blocks.7.attn1.to_out.0.lora_B.weight", OUT, Role.UP),
        ("blocks.7.attn1.to_q_lora.up.weight", Q, Role.UP),
        ("lora_unet_blocks_7_self_attn_q.lora_down.weight", Q, Role.DOWN),
        ("lora_unet__blocks_7_self_attn_q.lora_up.weight", Q, Role.UP),
        ("lora_unet_blocks_7_self_attn_q.alpha", Q, Role.ALPHA),
        ("lora_unet_blocks_7_attn1_to_out_0.lora_up.weight", OUT, Role.UP),
        ("lora_unet_blocks_7_ffn_0.lora_up.weight", "blocks.7.ffn.0.weight", Role.UP),
        ("lora_unet_head_head.alpha", "head.head.weight", Role.ALPHA),
        ("lora_unet_time_projection_1.lora_down.weight", "time_projection.1.weight", Role.DOWN),
        ("lora_unet_vace_blocks_0_after_proj.alpha", "vace_blocks.0.after_proj.weight", Role.ALPHA),
        ("diffusion_model.blocks.7.self_attn.q.diff", Q, Role.DIFF),
        ("diffusion_model.blocks.7.self_attn.q.diff_b", "blocks.7.self_attn.q.bias", Role.DIFF),
        ("diffusion_model.blocks.7.self_attn.q.bias.diff", "blocks.7.self_attn.q.bias", Role.DIFF),
        ("diffusion_model.blocks.7.self_attn.q.weight.diff", Q, Role.DIFF),
        ("diffusion_model.blocks.7.modulation.diff", MODULATION, Role.DIFF),
        ("diffusion_model.blocks.7.diff_m", MODULATION, Role.DIFF),
        ("blocks.7.scale_shift_table.diff", MODULATION, Role.DIFF),
        ("diffusion_model.head.modulation.set_weight", "head.modulation", Role.SET),
        ("diffusion_model.blocks.7.norm3.set_weight", "blocks.7.norm3.weight", Role.SET),
        (
            "face_adapter.fuser_blocks.0.linear1_q.lora_up.weight",
            "face_adapter.fuser_blocks.0.linear1_q.weight",
            Role.UP,
        ),
        ("vace_patch_embedding.bias.diff", "vace_patch_embedding.bias", Role.DIFF),
        ("control_adapter.conv.weight.diff", "control_adapter.conv.weight", Role.DIFF),
        ("control_adapter.conv.diff", "control_adapter.conv.weight", Role.DIFF),
        ("head_global.modulation.diff", "head_global.modulation", Role.DIFF),
        ("model.diffusion_model.scaled_fp8", "scaled_fp8", Role.VALUE),
        ("blocks.7.self_attn.q.scale_weight", "blocks.7.self_attn.q.scale_weight", Role.VALUE),
        ("blocks.7.attn1.to_q.weight_scale", "blocks.7.self_attn.q.weight_scale", Role.VALUE),
        ("blocks.7.attn1.to_q.comfy_quant", "blocks.7.self_attn.q.comfy_quant", Role.VALUE),
    ],
)
def test_endings_say_what_a_tensor_is(key: str, target: str, role: Role) -> None:
    assert best_scheme([key])[1] == {key: Name(target, role)}


@pytest.mark.parametrize(
    "key",
    [
        "blocks.7.self_attn.gate.weight",
        "blocks.7.self_attn.q",
        "blocks.x.self_attn.q.weight",
        "blocks.7.self_attn.q.lora_B.bias",
        "lora_unet_blocks_7_self_attn_r.alpha",
        "head.weight",
        "",
        "blocks",
    ],
)
def test_other_names_mean_nothing(key: str) -> None:
    assert all(scheme.parse(key) is None for scheme in SCHEMES)


@pytest.mark.parametrize(
    ("added", "in_dim", "out", "name"),
    [
        ((), 16, 64, "T2V"),
        ((), 36, 64, "I2V"),
        ((), 48, 192, "TI2V"),
        ((), 48, 64, "Fun control"),
        ((), 52, 64, "Fun control"),
        ((), 20, 64, "with 20 input channels"),
        ((), None, None, None),
        (("img_emb.proj.0.weight",), 36, 64, "I2V"),
        (("blocks.0.cross_attn.k_img.weight",), None, None, "I2V"),
        (("img_emb.emb_pos", "img_emb.proj.0.weight"), 36, 64, "FLF2V"),
        (("vace_patch_embedding.weight",), 16, 64, "VACE"),
        (("control_adapter.conv.weight",), 32, 64, "camera control"),
        (("casual_audio_encoder.weights",), 16, 64, "S2V"),
        (("audio_proj.norm.weight",), 36, 64, "HuMo"),
        (("face_adapter.fuser_blocks.0.k_norm.weight",), 36, 64, "Animate"),
    ],
)
def test_a_model_is_known_by_its_modules_and_channels(
    added: tuple[str, ...], in_dim: int | None, out: int | None, name: str | None
) -> None:
    assert model_type([Q, *added], in_dim, out) == name
