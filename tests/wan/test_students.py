"""What a student's file is said to be, and what is refused, with what to do about it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from sparge_core import SparseConfig
from sparge_core.wan import DIFF, FULL, LOW_RANK, StudentError, read_student

from .conftest import Save
from .files import Shapes, diffusers_name, image_model, low_rank, vace_model, wan_model, write_hollow

BASE = "sparge_attention2.base_model"
OURS = SparseConfig(top_k=0.04, top_p=0.25)
ATTENTION = {f"blocks.{i}.self_attn.{name}": (64, 64) for i in range(2) for name in "qkvo"}


def refused(path: Path) -> str:
    """The message, which has to name the file, what it looks like, what was expected and what to do."""
    with pytest.raises(StudentError) as error:
        read_student(path)
    text = str(error.value)
    assert text.startswith(path.name)
    assert "; expected " in text
    assert text.endswith(".")
    assert "\n" not in text
    assert len(text) < 700
    return text


# ----------------------------------------------------------------------------------------------------------
# Kinds, sizes and types


@pytest.mark.parametrize(
    ("shapes", "type_"),
    [(wan_model(), "T2V"), (image_model(), "I2V"), (image_model(flf=True), "FLF2V"), (vace_model(), "VACE")],
    ids=["t2v", "i2v", "flf2v", "vace"],
)
@pytest.mark.parametrize("scheme", ["Wan", "diffusers"])
def test_full_models_are_known(save: Save, shapes: Shapes, type_: str, scheme: str) -> None:
    rename = diffusers_name if scheme == "diffusers" else str
    student = read_student(save({rename(key): shape for key, shape in shapes.items()}))
    assert (student.kind, student.scheme, student.type) == (FULL, scheme, type_)
    assert (student.dim, student.layers, student.size) == (64, 2, None)
    assert student.shapes == shapes


@pytest.mark.parametrize(
    "prefix", ["model.", "diffusion_model.", "model.diffusion_model.", "module.", "_orig_mod."]
)
def test_prefixed_full_models_are_known(save: Save, prefix: str) -> None:
    assert (
        read_student(save({prefix + key: shape for key, shape in wan_model().items()})).shapes == wan_model()
    )


@pytest.mark.parametrize("rename", [str, diffusers_name], ids=["wan", "diffusers"])
def test_a_prefix_that_is_unknown_is_named(save: Save, rename: type[str]) -> None:
    behind = [{f"{name}.model.{rename(key)}": (4,) for key in wan_model()} for name in ("generator", "ema")]
    text = refused(save({**behind[0], **behind[1]}))
    assert "has Wan's names behind a prefix unknown here (ema.model., generator.model.)" in text
    assert "without what is in front of `blocks`" in text


def test_wrapped_full_models_are_known(save: Save) -> None:
    wrapped = {
        key.replace(".self_attn", "._checkpoint_wrapped_module.self_attn._orig_mod"): shape
        for key, shape in wan_model().items()
    }
    assert read_student(save(wrapped)).shapes == wan_model()


def test_a_checkpoint_may_hold_other_models_beside(save: Save) -> None:
    shapes = {f"model.diffusion_model.{key}": shape for key, shape in wan_model().items()}
    path = save({**shapes, "vae.decoder.conv1.weight": (3, 3), "text_encoders.umt5.shared.weight": (5, 5)})
    assert read_student(path).shapes == wan_model()


@pytest.mark.parametrize(
    ("dim", "ffn", "layers", "in_dim", "out_dim", "name", "type_"),
    [
        (1536, 8960, 30, 16, 16, "1.3B", "T2V"),
        (5120, 13824, 40, 16, 16, "14B", "T2V"),
        (5120, 13824, 40, 36, 16, "14B", "I2V"),
        (3072, 14336, 30, 48, 48, "5B", "TI2V"),
    ],
)
def test_published_sizes_are_known(
    tmp_path: Path, dim: int, ffn: int, layers: int, in_dim: int, out_dim: int, name: str, type_: str
) -> None:
    shapes = wan_model(dim=dim, ffn=ffn, layers=layers, in_dim=in_dim, out_dim=out_dim, text=4096, freq=256)
    student = read_student(write_hollow(tmp_path / "student.safetensors", shapes, "BF16", 2))
    assert student.size is not None
    assert (student.size.name, student.layers, student.type) == (name, layers, type_)
    assert f"Wan {type_} {name}" in student.title


@pytest.mark.parametrize(
    ("up", "down", "prefix"),
    [
        (".lora_B.weight", ".lora_A.weight", "diffusion_model."),
        (".lora_B.default.weight", ".lora_A.default.weight", "base_model.model."),
        (".lora_up.weight", ".lora_down.weight", ""),
        ("_lora.up.weight", "_lora.down.weight", "transformer."),
    ],
)
def test_low_rank_files_are_known(save: Save, up: str, down: str, prefix: str) -> None:
    pairs = low_rank(ATTENTION, up, down)
    student = read_student(save({prefix + key: shape for key, shape in pairs.items()}))
    assert (student.kind, student.dim, student.layers, student.type) == (LOW_RANK, 64, 2, None)
    assert student.shapes == {f"{module}.weight": shape for module, shape in ATTENTION.items()}


@pytest.mark.parametrize("start", ["lora_unet_", "lora_unet__"])
@pytest.mark.parametrize("rename", [str, diffusers_name], ids=["wan", "diffusers"])
def test_kohyas_low_rank_files_are_known(save: Save, start: str, rename: type[str]) -> None:
    names = {
        start + rename(f"{module}.")[:-1].replace(".", "_"): shape for module, shape in ATTENTION.items()
    }
    pairs = low_rank(names, ".lora_up.weight", ".lora_down.weight")
    student = read_student(save({**pairs, **{f"{name}.alpha": () for name in names}}))
    assert student.kind == LOW_RANK
    assert student.shapes == {f"{module}.weight": shape for module, shape in ATTENTION.items()}


@pytest.mark.parametrize("ending", [".diff", ".set_weight"])
def test_diffs_are_known(save: Save, ending: str) -> None:
    student = read_student(
        save({f"diffusion_model.{module}{ending}": shape for module, shape in ATTENTION.items()})
    )
    assert (student.kind, student.dim, student.layers) == (DIFF, 64, 2)


def test_a_low_rank_file_may_hold_diffs_beside(save: Save) -> None:
    pairs = low_rank(ATTENTION, ".lora_up.weight", ".lora_down.weight")
    student = read_student(save({**pairs, "blocks.0.norm3.diff_b": (64,), "blocks.0.diff_m": (1, 6, 64)}))
    assert student.kind == LOW_RANK
    assert student.shapes["blocks.0.modulation"] == (1, 6, 64)


DTYPES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPES.values())
def test_number_formats_are_known(save: Save, dtype: torch.dtype) -> None:
    assert read_student(save(wan_model(), dtype=dtype)).dtype == DTYPES[dtype]


def scaled(shapes: Mapping[str, tuple[int, ...]], leaf: str) -> dict[str, torch.Tensor | tuple[int, ...]]:
    """The linear layers of the blocks in fp8, each with a scale."""
    out: dict[str, torch.Tensor | tuple[int, ...]] = {}
    for key, shape in shapes.items():
        quantised = key.startswith("blocks.") and len(shape) == 2
        out[key] = torch.zeros(shape, dtype=torch.float8_e4m3fn) if quantised else shape
        if quantised:
            out[key.replace(".weight", f".{leaf}")] = torch.ones((), dtype=torch.float32)
    return out


def test_scaled_fp8_is_known(save: Save) -> None:
    old = {
        **scaled(wan_model(layers=8), "scale_weight"),
        "scaled_fp8": torch.zeros(0, dtype=torch.float8_e4m3fn),
    }
    new = scaled(wan_model(layers=8), "weight_scale")
    new.update(
        {
            key.replace("weight_scale", "comfy_quant"): torch.zeros(9, dtype=torch.uint8)
            for key in new
            if "scale" in key
        }
    )
    for content in (old, new):
        student = read_student(save(content))
        assert (student.kind, student.dtype, student.dim) == (FULL, "F8_E4M3", 64)


@pytest.mark.parametrize("leaf", ["scale_weight", "weight_scale"])
def test_scales_that_nothing_marks_are_refused(save: Save, leaf: str) -> None:
    """ComfyUI passes over them, and the picture is noise."""
    text = refused(save(scaled(wan_model(), leaf)))
    assert "stores 20 scales of weights, and no mark how to use them" in text
    assert "made for ComfyUI" in text


@pytest.mark.parametrize("shape", [(3,), (64, 1), (0,), (2, 32)])
def test_scales_that_do_not_fit_their_weights_are_refused(save: Save, shape: tuple[int, ...]) -> None:
    """ComfyUI fails on them in the middle of a run."""
    mark = {"scaled_fp8": torch.zeros(0, dtype=torch.float8_e4m3fn)}
    content = {**scaled(wan_model(), "scale_weight"), **mark}
    for fits in ((), (1,), (1, 1), (64,)):
        read_student(save({**content, "blocks.0.self_attn.q.scale_weight": torch.ones(fits)}))
    text = refused(save({**content, "blocks.0.self_attn.q.scale_weight": torch.ones(shape)}))
    assert "1 scales of weights, not one each or one a row (blocks.0.self_attn.q.scale_weight)" in text


# ----------------------------------------------------------------------------------------------------------
# Half-matching files and those of others


def test_missing_and_unknown_keys_are_one_error_with_counts_and_a_few_examples(save: Save) -> None:
    shapes = wan_model(layers=4)
    content = {key: shape for key, shape in shapes.items() if not key.startswith("blocks.1.")}
    text = refused(save({**content, **{f"blocks.0.strange.{i}": (1,) for i in range(40)}}))
    assert "27 parameters are missing" in text
    assert f"40 of its {len(content) + 40} keys are unknown" in text
    assert text.count("blocks.") <= 6
    assert "full model of Wan T2V" in text


def test_a_part_of_a_model_asks_for_the_other_parts(save: Save) -> None:
    content = {key: shape for key, shape in wan_model().items() if "head" not in key}
    text = refused(save(content, name="diffusion_pytorch_model-00001-of-00002.safetensors"))
    assert "part 1 of 2" in text


@pytest.mark.parametrize("lost", ["lora_up", "lora_down"])
def test_half_a_low_rank_pair_is_refused(save: Save, lost: str) -> None:
    pairs = low_rank(ATTENTION, ".lora_up.weight", ".lora_down.weight")
    del pairs[f"blocks.1.self_attn.k.{lost}.weight"]
    text = refused(save(pairs))
    assert "1 low-rank pairs are incomplete" in text
    assert "blocks.1.self_attn.k.weight" in text


def test_factors_of_unlike_rank_are_refused(save: Save) -> None:
    pairs = low_rank(ATTENTION, ".lora_up.weight", ".lora_down.weight")
    pairs["blocks.1.self_attn.k.lora_up.weight"] = (64, 5)
    assert "do not fit together" in refused(save(pairs))


def test_two_keys_for_one_parameter_are_refused(save: Save) -> None:
    assert "for a second time" in refused(save({**wan_model(), "model.head.modulation": (1, 2, 64)}))


def test_a_block_of_another_shape_is_refused(save: Save) -> None:
    shapes = wan_model() | {"blocks.1.ffn.0.weight": (96, 64)}
    text = refused(save(shapes))
    assert "differ in shape between blocks" in text
    assert "blocks.1.ffn.0.weight" in text


@pytest.mark.parametrize(
    ("key", "shape"),
    [
        ("patch_embedding.weight", (64,)),
        ("head.head.weight", ()),
        ("head.modulation", (1, 2, 99_999)),
        ("blocks.0.ffn.0.weight", ()),
        ("blocks.0.self_attn.q.weight", (99_999, 1)),
    ],
)
def test_shapes_that_would_make_a_model_of_another_width_are_refused(
    save: Save, key: str, shape: tuple[int, ...]
) -> None:
    """ComfyUI takes a model's size from these and would fail on them, or allocate what the file lacks."""
    text = refused(save(wan_model(layers=1) | {key: shape}))
    assert "not of its width" in text
    assert key in text or "99999" in text


def test_a_low_rank_pair_without_a_rank_is_refused(save: Save) -> None:
    pairs = low_rank(ATTENTION, ".lora_up.weight", ".lora_down.weight", rank=0)
    assert "do not fit together" in refused(save(pairs))


def test_an_alpha_is_one_number_of_any_kind(save: Save) -> None:
    pairs = low_rank(ATTENTION, ".lora_up.weight", ".lora_down.weight")
    whole = {f"{module}.alpha": torch.tensor(4) for module in ATTENTION}
    assert read_student(save({**pairs, **whole})).kind == LOW_RANK
    assert "do not fit together" in refused(save({**pairs, **whole, "blocks.0.self_attn.q.alpha": (4,)}))


@pytest.mark.parametrize("ending", [".diff", ".set_weight", ".weight"])
def test_a_parameter_that_is_changed_in_two_ways_is_refused(save: Save, ending: str) -> None:
    """ComfyUI keeps one change of a parameter and drops the other without a word."""
    pairs = low_rank(ATTENTION, ".lora_up.weight", ".lora_down.weight")
    text = refused(save({**pairs, f"blocks.1.self_attn.k{ending}": (64, 64)}))
    assert "1 parameters are changed in two ways (blocks.1.self_attn.k.weight)" in text


@pytest.mark.parametrize(
    ("leaf", "named"),
    [
        ("dora_scale", "DoRA"),
        ("lora_magnitude_vector.weight", "DoRA"),
        ("hada_w1_a", "LoHa"),
        ("lokr_w2", "LoKr"),
        ("oft_blocks", "OFT"),
        ("lora_mid.weight", "a factor between the two"),
        ("lora_up.bias", "biases"),
    ],
)
@pytest.mark.parametrize("beside", [True, False])
def test_adapters_of_other_kinds_are_refused_by_name(save: Save, leaf: str, named: str, beside: bool) -> None:
    pairs = low_rank(ATTENTION, ".lora_up.weight", ".lora_down.weight") if beside else {}
    text = refused(save({**pairs, f"blocks.0.self_attn.q.{leaf}": (64, 4)}))
    assert "an adapter of another kind" in text
    assert named in text
    assert "plain low-rank file or diff" in text


def test_a_file_without_tensors_is_refused(save: Save) -> None:
    assert "holds no tensors" in refused(save({}))


@pytest.mark.parametrize(
    ("key", "named"),
    [
        ("lora_unet_double_blocks_0_img_attn_qkv.lora_up.weight", "FLUX"),
        ("model.diffusion_model.input_blocks.1.0.in_layers.0.weight", "Stable Diffusion"),
        ("down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q.lora_A.weight", "Stable Diffusion"),
        ("joint_blocks.0.x_block.attn.qkv.weight", "Stable Diffusion 3"),
        ("transformer_blocks.0.attn1.to_q.weight", "another transformer"),
        ("decoder.upsamples.0.residual.0.gamma", "a VAE"),
        ("encoder.block.0.layer.0.SelfAttention.q.weight", "T5"),
        ("text_model.encoder.layers.0.mlp.fc1.weight", "CLIP"),
        ("something.weight", "no key of a Wan model"),
    ],
)
def test_files_of_other_models_are_named(save: Save, key: str, named: str) -> None:
    text = refused(save({key: (4, 4), f"{key}2": (4, 4)}))
    assert named in text
    assert "Wan2.1" in text


@pytest.mark.parametrize(
    ("key", "method"),
    [
        ("blocks.0.self_attn.attn_op.local_attn.proj_l.weight", "SLA"),
        ("blocks.0.attn1.attn_impl.proj_l.bias", "SLA"),
        ("blocks.0.self_attn.proj_l.lora_A.weight", "SLA"),
        ("lora_unet_blocks_0_self_attn_proj_l.lora_down.weight", "SLA"),
        ("blocks.0.to_gate_compress.weight", "VSA"),
        ("blocks.0.attn1.to_gate_compress.bias", "VSA"),
        ("blocks.0.self_attn.router.proj_q.weight", "another method"),
    ],
)
def test_parameters_of_other_methods_are_refused_by_name(save: Save, key: str, method: str) -> None:
    text = refused(save({**wan_model(), key: (4, 4)}))
    assert f"is a student of {method}" in text
    assert key in text
    assert "does not have" in text


def test_8_bit_weights_of_turbodiffusion_are_refused_by_name(save: Save) -> None:
    shapes = {key.replace("q.weight", "q.int8_weight"): shape for key, shape in wan_model().items()}
    text = refused(save(shapes))
    assert "8-bit integers" in text
    assert "bf16" in text


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_integer_weights_without_scales_are_refused(save: Save, dtype: torch.dtype) -> None:
    content = {**wan_model(), "blocks.0.ffn.0.weight": torch.zeros(128, 64, dtype=dtype)}
    assert "and no scales" in refused(save(content))
    bias = {**wan_model(), "blocks.0.ffn.0.bias": torch.zeros(128, dtype=dtype)}
    assert "and no scales" in refused(save(bias))
    assert "and no scales" in refused(save({"blocks.0.diff_m": torch.zeros(1, 6, 64, dtype=dtype)}))
    quantised = {"layers": {"blocks.0.ffn.0": {"format": "int8_tensorwise"}}}
    read_student(save(content, metadata={"_quantization_metadata": json.dumps(quantised)}))


# ----------------------------------------------------------------------------------------------------------
# Settings


def test_settings_in_the_file_come_along(save: Save) -> None:
    student = read_student(save(wan_model(), metadata={**OURS.to_metadata(), BASE: "Wan2.2 high noise"}))
    assert student.advice.startswith("It was distilled from Wan2.2 high noise. ")
    assert student.config == OURS
    assert "top_k 0.04, top_p 0.25" in student.advice
    assert "auto" in student.advice


def test_a_full_model_without_its_last_blocks_is_no_smaller_model(tmp_path: Path) -> None:
    path = tmp_path / "half.safetensors"
    write_hollow(path, wan_model(dim=1536, ffn=8960, layers=28), "BF16", 2)
    text = refused(path)
    assert "2 blocks are missing" in text
    assert "blocks.28" in text


@pytest.mark.parametrize(("dim", "layers", "top_p"), [(1536, 30, "0.2"), (5120, 40, "0.16")])
def test_without_settings_the_methods_own_for_that_size_are_named(
    tmp_path: Path, dim: int, layers: int, top_p: str
) -> None:
    path = write_hollow(tmp_path / "student.safetensors", wan_model(dim=dim, layers=layers), "BF16", 2)
    student = read_student(path)
    assert student.config is None
    assert "manual" in student.advice
    assert student.advice.endswith(f"{'1.3B' if dim == 1536 else '14B'} are top_k 0.03, top_p {top_p}.")


def test_for_a_size_without_own_settings_that_is_said(save: Save) -> None:
    advice = read_student(save(wan_model())).advice
    assert "for this size it gives none" in advice
    assert "top_p 0.2 for 1.3B" in advice


@pytest.mark.parametrize(
    "change",
    [{"top_k": "2"}, {"top_p": "x"}, {"block_q": "64"}, {"method_version": "99"}, {"sparsity": "nan"}],
)
def test_settings_that_cannot_be_used_are_refused_with_the_files_name(
    save: Save, change: dict[str, str]
) -> None:
    metadata = {**OURS.to_metadata(), **{f"sparge_attention2.{key}": value for key, value in change.items()}}
    text = refused(save(wan_model(), metadata=metadata))
    assert "carries settings that cannot be used" in text
    assert next(iter(change)) in text


@pytest.mark.parametrize("share", ["nan", "15%", "2"])
def test_settings_of_another_method_that_cannot_be_used_are_refused(save: Save, share: str) -> None:
    metadata = {"attention_type": "sla", "sla_topk": share}
    assert "carries settings that cannot be used" in refused(save(wan_model(), metadata=metadata))


def test_metadata_of_any_depth_is_no_error(save: Save) -> None:
    deep = '{"a":' * 50_000 + "1" + "}" * 50_000
    assert read_student(save(wan_model(), metadata={"attention": deep})).config is None


@pytest.mark.parametrize(
    "metadata",
    [
        {"sla_topk": "0.15"},
        {"sla_attn_setting": json.dumps({"sparsity_ratio": 0.85, "BLKQ": 128, "BLKK": 64})},
        {
            "config": json.dumps(
                {"attention": {"sla_sparsity_ratio": 0.85, "q_block_size": 64, "k_block_size": 64}}
            )
        },
    ],
    ids=["kept", "skipped", "nested"],
)
def test_plain_sla_students_run_at_their_top_k(save: Save, metadata: dict[str, str]) -> None:
    pairs = low_rank(ATTENTION, ".lora_up.weight", ".lora_down.weight")
    student = read_student(save(pairs, metadata={"attention_type": "sla", **metadata}))
    assert student.config == SparseConfig(top_k=0.15, top_p=0.0)
    assert student.method is not None
    assert "SLA" in student.advice


def test_a_plain_sla_student_without_settings_asks_for_its_top_k(save: Save) -> None:
    pairs = low_rank(ATTENTION, ".lora_up.weight", ".lora_down.weight")
    student = read_student(save(pairs, name="wan_turbo_4step_SLA_bf16.safetensors"))
    assert student.config is None
    assert "top_k = 1 - the sparsity" in student.advice
    assert "top_p 0" in student.advice


def test_sla_masks_of_other_blocks_are_refused(save: Save) -> None:
    pairs = low_rank(ATTENTION, ".lora_up.weight", ".lora_down.weight")
    text = refused(save(pairs, metadata={"sla_config": json.dumps({"topk": 0.1, "blkq": 32, "blkk": 32})}))
    assert "SLA" in text
    assert "32" in text


@pytest.mark.parametrize(
    ("name", "metadata", "method"),
    [
        ("wan_vmoba.safetensors", {}, "VMoBA"),
        ("a.safetensors", {"attention": "VMoBA"}, "VMoBA"),
        ("a.safetensors", {"attention_method": "radial_attention"}, "Radial"),
        ("wan-vsa-1.3b.safetensors", {}, "VSA"),
    ],
)
def test_methods_without_parameters_are_known_by_name_and_metadata(
    save: Save, name: str, metadata: dict[str, str], method: str
) -> None:
    assert f"student of {method}" in refused(save(wan_model(), name=name, metadata=metadata))


def test_our_own_settings_win_over_a_name(save: Save) -> None:
    student = read_student(save(wan_model(), name="not_sla.safetensors", metadata=OURS.to_metadata()))
    assert (student.config, student.method) == (OURS, None)


@pytest.mark.parametrize(
    "metadata", [{"comment": "better than sla and vmoba"}, {"ss_dataset": "radial attention"}]
)
def test_words_elsewhere_in_the_metadata_mean_nothing(save: Save, metadata: dict[str, str]) -> None:
    assert read_student(save(wan_model(), metadata=metadata)).method is None


def test_the_alpha_of_peft_is_read(save: Save) -> None:
    pairs = low_rank(ATTENTION, ".lora_B.weight", ".lora_A.weight")
    settings = {"transformer.r": 4, "transformer.lora_alpha": 8, "transformer.alpha_pattern": {}}
    path = save(pairs, metadata={"lora_adapter_metadata": json.dumps(settings)})
    assert read_student(path).alpha == 8


@pytest.mark.parametrize("special", ["use_rslora", "use_dora"])
def test_other_scalings_of_peft_are_refused(save: Save, special: str) -> None:
    pairs = low_rank(ATTENTION, ".lora_B.weight", ".lora_A.weight")
    settings = json.dumps({"transformer.lora_alpha": 8, f"transformer.{special}": True})
    assert special in refused(save(pairs, metadata={"lora_adapter_metadata": settings}))
    for damaged in ("[1", json.dumps({"transformer.lora_alpha": "nan"}), "[" * 100_000):
        assert "damaged metadata" in refused(save(pairs, metadata={"lora_adapter_metadata": damaged}))
