"""How files name Wan's parameters, as tables, and what a name means. Knows no file, no tensor and no ComfyUI.

Everything is converted to the names of the original Wan without any prefix, which are ComfyUI's too, such as
`blocks.0.self_attn.q.weight`. Diffusers' names are those of its WanTransformer3DModel and its VACE variant.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from ..config import SparseConfig

# ----------------------------------------------------------------------------------------------------------
# The parameters of Wan

AFFINE = ("weight", "bias")
SCALE = ("weight",)
ITSELF = ("",)  # a parameter that belongs to no module of its own

# Beside the weight of a quantised module: ComfyUI's first scaled fp8, and what replaced it.
QUANTISATION = (
    "scale_weight",
    "scale_input",
    "comfy_quant",
    "weight_scale",
    "weight_scale_2",
    "input_scale",
    "pre_quant_scale",
)
SCALED_FP8 = "scaled_fp8"  # marks a file of the first kind
# Leaves with the scales of a weight, and the key without which ComfyUI passes over them; {}: their module.
MARKS = {"scale_weight": SCALED_FP8, "weight_scale": "{}.comfy_quant"}
# Leaves of modules whose weight may then be stored as integers.
QUANTISED = ("comfy_quant", "weight_scale")


@dataclass(frozen=True)
class Part:
    """A module, or a lone parameter: its name in Wan and in diffusers, and the parameters under it."""

    wan: str
    diffusers: str
    leaves: tuple[str, ...] = AFFINE

    def parameters(self, name: str) -> Iterator[str]:
        for leaf in self.leaves:
            yield f"{name}.{leaf}" if leaf else name


STEM = (
    Part("patch_embedding", "patch_embedding"),
    Part("text_embedding.0", "condition_embedder.text_embedder.linear_1"),
    Part("text_embedding.2", "condition_embedder.text_embedder.linear_2"),
    Part("time_embedding.0", "condition_embedder.time_embedder.linear_1"),
    Part("time_embedding.2", "condition_embedder.time_embedder.linear_2"),
    Part("time_projection.1", "condition_embedder.time_proj"),
    Part("head.head", "proj_out"),
    Part("head.modulation", "scale_shift_table", ITSELF),
)
BLOCK = (
    Part("self_attn.q", "attn1.to_q"),
    Part("self_attn.k", "attn1.to_k"),
    Part("self_attn.v", "attn1.to_v"),
    Part("self_attn.o", "attn1.to_out.0"),
    Part("self_attn.norm_q", "attn1.norm_q", SCALE),
    Part("self_attn.norm_k", "attn1.norm_k", SCALE),
    Part("cross_attn.q", "attn2.to_q"),
    Part("cross_attn.k", "attn2.to_k"),
    Part("cross_attn.v", "attn2.to_v"),
    Part("cross_attn.o", "attn2.to_out.0"),
    Part("cross_attn.norm_q", "attn2.norm_q", SCALE),
    Part("cross_attn.norm_k", "attn2.norm_k", SCALE),
    Part("norm3", "norm2"),  # the only norm of a block with parameters; the two number the norms differently
    Part("ffn.0", "ffn.net.0.proj"),
    Part("ffn.2", "ffn.net.2"),
    Part("modulation", "scale_shift_table", ITSELF),
)
IMAGE_STEM = (
    Part("img_emb.proj.0", "condition_embedder.image_embedder.norm1"),
    Part("img_emb.proj.1", "condition_embedder.image_embedder.ff.net.0.proj"),
    Part("img_emb.proj.3", "condition_embedder.image_embedder.ff.net.2"),
    Part("img_emb.proj.4", "condition_embedder.image_embedder.norm2"),
)
IMAGE_BLOCK = (
    Part("cross_attn.k_img", "attn2.add_k_proj"),
    Part("cross_attn.v_img", "attn2.add_v_proj"),
    Part("cross_attn.norm_k_img", "attn2.norm_added_k", SCALE),
)
VACE_STEM = (Part("vace_patch_embedding", "vace_patch_embedding"),)
VACE_BLOCK = (Part("after_proj", "proj_out"),)
VACE_FIRST_BLOCK = (Part("before_proj", "proj_in"),)
OPTIONAL_STEM = (
    Part("img_emb.emb_pos", "condition_embedder.image_embedder.pos_embed", ITSELF),  # first-last-frame models
    Part("ref_conv", "ref_conv"),  # Fun models with a reference picture
)

ALL_STEM = STEM + IMAGE_STEM + VACE_STEM + OPTIONAL_STEM
ALL_BLOCK = BLOCK + IMAGE_BLOCK + VACE_BLOCK + VACE_FIRST_BLOCK


@dataclass(frozen=True)
class Family:
    """A kind of Wan model. mark: a module that only it has. adds: its others. All keep their names."""

    name: str
    mark: str
    adds: tuple[str, ...] = ()


# In the order in which ComfyUI tells them apart.
FAMILIES = (
    Family("VACE", "vace_patch_embedding"),
    Family("camera control", "control_adapter"),
    Family(
        "S2V",
        "casual_audio_encoder",
        ("audio_injector", "frame_packer", "cond_encoder", "trainable_cond_mask"),
    ),
    Family("HuMo", "audio_proj", ("audio_cross_attn_wrapper",)),
    Family("Animate", "face_adapter", ("face_encoder", "motion_encoder", "pose_patch_embedding")),
    Family("SCAIL 2", "patch_embedding_mask"),
    Family("SCAIL", "patch_embedding_pose"),
    Family(
        "WanDancer",
        "patch_embedding_global",
        ("head_global", "img_emb_refimage", "music_injector", "music_projection", "music_encoder"),
    ),
    Family("FLF2V", "img_emb.emb_pos"),
)
ADDED = re.compile(
    r"(?:blocks\.\d+\.)?(?:"
    + "|".join(name for family in FAMILIES for name in (family.mark, *family.adds) if "." not in name)
    + r")\..+"
)

IN_DIM_T2V = 16  # latent channels of Wan2.1
OUT_5B = 2 * 2 * 48  # values a patch: the 5B model alone works in the 48 channels of Wan2.2's own VAE
IN_DIMS = {IN_DIM_T2V: "T2V", 36: "I2V", 48: "Fun control", 52: "Fun control"}  # 52: that of Wan2.2


def model_type(targets: Collection[str], in_dim: int | None, out: int | None) -> str | None:
    """The kind of Wan model with these parameters, input channels and outputs a patch; None if open."""
    for family in FAMILIES:
        if any(target == family.mark or target.startswith(f"{family.mark}.") for target in targets):
            return family.name
    if out == OUT_5B:
        return "TI2V"
    if in_dim is not None:
        return IN_DIMS.get(in_dim, f"with {in_dim} input channels")
    return "I2V" if any(".k_img." in target or target.startswith("img_emb.") for target in targets) else None


@dataclass(frozen=True)
class Size:
    """A published size of Wan. settings: the method's for its student (arXiv 2602.13515), if it gives any."""

    name: str
    dim: int
    layers: int
    settings: SparseConfig | None


SIZES = (
    Size("1.3B", 1536, 30, SparseConfig(top_k=0.03, top_p=0.20)),
    Size("5B", 3072, 30, None),
    Size("14B", 5120, 40, SparseConfig(top_k=0.03, top_p=0.16)),
)

# By which a file shows the model's width, the low-rank ones too: parameter of a block, and axis.
WIDTH = (
    *((f"{attention}.{name}.weight", 0) for attention in ("self_attn", "cross_attn") for name in "qkvo"),
    ("ffn.2.weight", 0),
    ("norm3.weight", 0),
    ("modulation", -1),
)

# Parameters by which ComfyUI sizes a full model before it compares shapes, so that they must agree: how many
# axes they have, and which of them are the model's width.
SIZING = (
    ("patch_embedding.weight", 5, (0,)),
    ("head.head.weight", 2, (1,)),
    ("head.modulation", 3, (2,)),
    ("blocks.0.ffn.0.weight", 2, (1,)),
    ("blocks.0.self_attn.q.weight", 2, (0, 1)),
)

# ----------------------------------------------------------------------------------------------------------
# What stands around a name

# Of compile, checkpointing and sharding wrappers: anywhere in a name.
WRAPPERS = frozenset({"_checkpoint_wrapped_module", "_orig_mod", "_fsdp_wrapped_module", "module"})
# In front of it, in any combination: ComfyUI's, diffusers' and peft's.
PREFIXES = frozenset({"model", "diffusion_model", "transformer", "base_model"})
# Other models in a checkpoint file that has the diffusion model under `model.diffusion_model.`.
CHECKPOINT_PREFIX = "model.diffusion_model."
BESIDE = ("vae.", "first_stage_model.", "text_encoders.", "cond_stage_model.", "conditioner.", "clip_vision.")

UNDERSCORED = re.compile(r"lora_unet_+(.+)")
UNDERSCORED_BLOCK = re.compile(r"((?:vace_)?blocks)_(\d+)_(.+)")
BLOCK_START = re.compile(r"\b(?:vace_)?blocks\.\d")
BLOCK_NAME = re.compile(r"((?:vace_)?blocks)\.(\d+)\.(.+)")


class Role(Enum):
    """What a tensor is to the parameter that its name leads to; the values are ComfyUI's spelling of it."""

    VALUE = ""
    DIFF = ".diff"
    SET = ".set_weight"
    UP = ".lora_up.weight"
    DOWN = ".lora_down.weight"
    ALPHA = ".alpha"


# What names of parameters end in, by which they differ from names of modules where no table has them.
PARAMETERS = frozenset({*AFFINE, "modulation", "emb_pos", "weights", "padding_tokens", "kernel"})

LOW_RANK = frozenset({Role.UP, Role.DOWN, Role.ALPHA})

# How a name ends, what that makes of it, and the parameter that is meant when the rest names a module.
ENDINGS: tuple[tuple[re.Pattern[str], Role, str], ...] = tuple(
    (re.compile(ending), role, leaf)
    for ending, role, leaf in (
        # `.lora_A.weight` and `.lora_A.default.weight` by peft, `.lora_down.weight` by kohya,
        # `_lora.down.weight` and `.lora_linear_layer.down.weight` by diffusers
        (r"[._]lora(?:_linear_layer)?[._](?:A|down)(?:\.[\w-]+)?(?:\.weight)?$", Role.DOWN, "weight"),
        (r"[._]lora(?:_linear_layer)?[._](?:B|up)(?:\.[\w-]+)?(?:\.weight)?$", Role.UP, "weight"),
        (r"\.alpha$", Role.ALPHA, "weight"),
        (r"\.diff$", Role.DIFF, "weight"),
        (r"\.diff_b$", Role.DIFF, "bias"),
        (r"\.diff_m$", Role.DIFF, "modulation"),
        (r"\.set_weight$", Role.SET, "weight"),
    )
)
# The bias of a low-rank factor, which no loader of ComfyUI's adds: not the same as a weight of it.
FACTOR_BIAS = re.compile(r"[._]lora(?:_linear_layer)?[._](?:A|B|up|down)(?:\.[\w-]+)?\.bias$")


# ----------------------------------------------------------------------------------------------------------
# Schemes


@dataclass(frozen=True)
class Name:
    """What a name in a file means: a parameter of Wan, by Wan's own name, and what the tensor is to it."""

    target: str
    role: Role


@dataclass(frozen=True)
class Scheme:
    """A way to name Wan's parameters.

    stem, block: its names of parameters, those of a block without `blocks.N.`, to Wan's.
    stem_modules, block_modules: its names of modules with underscores in place of dots, to those with dots.
    added: whether the parameters that families add are known by it.
    """

    name: str
    stem: Mapping[str, str]
    block: Mapping[str, str]
    stem_modules: Mapping[str, str]
    block_modules: Mapping[str, str]
    added: bool

    def parse(self, key: str) -> Name | None:
        """What `key` of a file means, or None when this scheme has no such name."""
        path = strip(key)
        if FACTOR_BIAS.search(path):
            return None
        role, leaf = Role.VALUE, ""
        for ending, of_role, of_leaf in ENDINGS:
            if found := ending.search(path):
                path, role, leaf = path[: found.start()], of_role, of_leaf
                break
        if underscored := UNDERSCORED.fullmatch(path):
            path = self._dotted(underscored[1])
        # "blocks.0.ffn.0.diff" names a module, "blocks.0.modulation.diff" the parameter itself.
        of_module = bool(leaf) and path.rpartition(".")[2] not in PARAMETERS
        target = (self._parameter(f"{path}.{leaf}") if of_module else None) or self._parameter(path)
        return None if target is None else Name(target, role)

    def _parameter(self, path: str) -> str | None:
        if block := BLOCK_NAME.fullmatch(path):
            name = self.block.get(block[3])
            if name is not None:
                return f"{block[1]}.{block[2]}.{name}"
        elif path in self.stem:
            return self.stem[path]
        return path if self.added and ADDED.fullmatch(path) else None

    def _dotted(self, path: str) -> str:
        if block := UNDERSCORED_BLOCK.fullmatch(path):
            return f"{block[1]}.{block[2]}.{self.block_modules.get(block[3], block[3])}"
        return self.stem_modules.get(path, path)


def strip(key: str) -> str:
    """`key` without the prefixes and wrappers around Wan's own name."""
    names = [name for name in key.split(".") if name not in WRAPPERS]
    while names and names[0] in PREFIXES:
        del names[0]
    return ".".join(names)


def _scheme(name: str, column: str, *, added: bool) -> Scheme:
    def parameters(parts: Iterable[Part]) -> dict[str, str]:
        table: dict[str, str] = {}
        for part in parts:
            own = getattr(part, column)
            table.update(zip(part.parameters(own), part.parameters(part.wan), strict=True))
            if part.leaves != ITSELF:
                table.update({f"{own}.{leaf}": f"{part.wan}.{leaf}" for leaf in QUANTISATION})
        return table

    def modules(parts: Iterable[Part]) -> dict[str, str]:
        return {getattr(part, column).replace(".", "_"): getattr(part, column) for part in parts}

    return Scheme(
        name,
        {**parameters(ALL_STEM), SCALED_FP8: SCALED_FP8},
        parameters(ALL_BLOCK),
        modules(ALL_STEM),
        modules(ALL_BLOCK),
        added,
    )


SCHEMES = (_scheme("Wan", "wan", added=True), _scheme("diffusers", "diffusers", added=False))


def best_scheme(keys: Collection[str]) -> tuple[Scheme, dict[str, Name]]:
    """The scheme that knows most of `keys`, and what those mean that it knows."""
    read = [
        (scheme, {key: name for key in keys if (name := scheme.parse(key)) is not None}) for scheme in SCHEMES
    ]
    return max(read, key=lambda one: len(one[1]))


def unknown_prefixes(keys: Iterable[str]) -> list[str]:
    """What stands in front of Wan's names in `keys`, where nothing that is known does."""
    split = [
        (key[: block.start()], key[block.start() :]) for key in keys if (block := BLOCK_START.search(key))
    ]
    return sorted({prefix for prefix, name in split if any(scheme.parse(name) for scheme in SCHEMES)})


def count_blocks(targets: Iterable[str], kind: str = "blocks") -> int:
    """One more than the highest block number among Wan's names `targets`; kind: "blocks" or "vace_blocks"."""
    found = (BLOCK_NAME.fullmatch(target) for target in targets)
    return max((int(block[2]) + 1 for block in found if block and block[1] == kind), default=0)


def missing_parameters(targets: Collection[str]) -> list[str]:
    """What a full model that has the parameters `targets` lacks, by Wan's names.

    Of the modules that only some families have, those of I2V and VACE are checked; of others only the model's
    own code can tell.
    """
    present = set(targets)
    image = any(target.startswith("img_emb.proj.") for target in present)
    vace_blocks = count_blocks(present, "vace_blocks")

    expected = [*_names("", STEM + (IMAGE_STEM if image else ()) + (VACE_STEM if vace_blocks else ()))]
    for i in range(max(count_blocks(present), 1)):
        expected += _names(f"blocks.{i}.", BLOCK + (IMAGE_BLOCK if image else ()))
    for i in range(vace_blocks):
        expected += _names(f"vace_blocks.{i}.", BLOCK + VACE_BLOCK + (() if i else VACE_FIRST_BLOCK))
    return [name for name in expected if name not in present]


def _names(prefix: str, parts: Iterable[Part]) -> Iterator[str]:
    for part in parts:
        yield from part.parameters(prefix + part.wan)


# ----------------------------------------------------------------------------------------------------------
# Files of others


@dataclass(frozen=True)
class Method:
    """Another sparse-attention method whose students are published.

    has: what its attention has and this one lacks.
    parameters: in keys, where it adds any.
    word: in a file's name, or in what its metadata says of attention.
    plain: whether a student without those parameters is plain block-sparse softmax attention at a Top-k: it
        runs here with top_p 0.
    """

    name: str
    has: str
    parameters: re.Pattern[str] | None
    word: re.Pattern[str]
    plain: bool = False


METHODS = (
    Method(
        "SLA (sparse-linear attention, arXiv 2509.24006)",
        "a linear-attention branch with its own projection",
        re.compile(r"(?:^|[._])proj_l(?:[._]|$)"),
        re.compile(r"\b(?:sage)?sla\b"),
        plain=True,
    ),
    Method(
        "VSA (video sparse attention, arXiv 2505.13389)",
        "gates for a coarse attention branch",
        re.compile(r"(?:^|[._])(?:to_)?gate_compress(?:[._]|$)"),
        re.compile(r"\bvsa\b"),
    ),
    Method(
        "VMoBA (arXiv 2506.23858)",
        "key blocks along one, two and three axes in turn",
        None,
        re.compile(r"\bvmoba\b"),
    ),
    Method(
        "Radial Attention (arXiv 2506.19852)",
        "a fixed mask that thins out with the distance in time",
        None,
        re.compile(r"\bradial (?:attn|attention)\b"),
    ),
)

# A parameter inside a self-attention that neither Wan nor a method above has: of a method unknown here.
IN_SELF_ATTENTION = re.compile(r"blocks[._]\d+[._](?:self_attn|attn1)[._]")
# 8-bit linear layers as TurboDiffusion and its conversions write them.
INTEGER_WEIGHT = re.compile(r"[._]int8_weight")

# What the metadata of plain block-sparse students calls the share of blocks kept or skipped, and the blocks.
KEPT = ("sla_topk", "topk", "top_k", "topk_ratio")
SKIPPED = ("sla_sparsity_ratio", "sparsity_ratio", "sparsity")
ROWS = ("blkq", "block_q", "q_block_size")
COLUMNS = ("blkk", "block_k", "k_block_size")
PLAIN_BLOCKS = frozenset({(128, 64), (64, 64)})

# Adapters that are more than a low-rank pair, by what only their keys have.
OTHER_ADAPTERS = (
    ("DoRA", re.compile(r"[._](?:dora_scale|lora_magnitude_vector)(?:[._]|$)")),
    ("LoHa", re.compile(r"[._]hada_[wt]\d")),
    ("LoKr", re.compile(r"[._]lokr_[wt]\d")),
    ("OFT", re.compile(r"[._]oft_(?:blocks|diag|R)\b")),
    ("a low-rank one with a factor between the two", re.compile(r"[._]lora_mid(?:[._]|$)")),
    ("a low-rank one with biases", FACTOR_BIAS),
)

# Keys by which files of other models are known.
OTHER_MODELS = (
    (re.compile(r"(?:^|\.|_)double_blocks[._]\d"), "a FLUX or HunyuanVideo model or LoRA"),
    (
        re.compile(r"(?:^|\.|_)(?:input_blocks|down_blocks)[._]\d.*(?:attn|transformer_blocks|in_layers|op)"),
        "a Stable Diffusion model or LoRA",
    ),
    (re.compile(r"(?:^|\.|_)joint_blocks[._]\d"), "a Stable Diffusion 3 model or LoRA"),
    (
        re.compile(r"(?:^|\.|_)transformer_blocks[._]\d"),
        "a model or LoRA of another transformer (LTX, Qwen-Image, CogVideoX and others)",
    ),
    (
        re.compile(r"^(?:encoder|decoder)\.(?:downsamples|upsamples|down_blocks|up_blocks|conv1|conv_in)"),
        "a VAE",
    ),
    (
        re.compile(r"^(?:encoder\.block\.\d+\.layer\.0\.Self|blocks\.\d+\.attn\.[qk]\.|shared\.weight$)"),
        "a T5 text encoder",
    ),
    (re.compile(r"(?:text_model|vision_model|visual)\.(?:encoder|embeddings|transformer)"), "a CLIP model"),
)


def other_model(keys: Iterable[str]) -> str | None:
    """In words, whose keys these are, if that is known."""
    keys = list(keys)
    return next((name for pattern, name in OTHER_MODELS if any(pattern.search(key) for key in keys)), None)
