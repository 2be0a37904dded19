"""A student and its teacher in one process or many: diffusers' Wan, with full weights or low-rank factors."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn

from ..attention import choose
from ..geometry import BLOCK_Q
from ..wan import LOW_RANK as LOW_RANK_FILE
from ..wan import StudentError, check_base, read_student
from ..wan.keys import Role
from ..wan.transformer import DIFFUSERS, SparseSelfAttention, differences, load_transformer, read_config
from . import DistillError
from .data import Dataset, Sample
from .flow import INITIAL, MODEL_STEPS, generator
from .options import FULL, SELF_ATTENTION, TrainOptions

log = logging.getLogger(__name__)

BACKEND = "inductor"  # torch's compiler
ADAPTER = "default"  # peft's name for the only one
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class Pair(Protocol):
    """What the loop trains: the student's trained parameters by name, and the two velocities.

    facts: of the model, JSON-able; a checkpoint resumes only with equal ones.
    x_t: (B, C, T, H, W) fp32; t: (B,) in (0, 1); condition: B samples. Velocities: (B, C, T, H, W).
    """

    @property
    def trained(self) -> Mapping[str, nn.Parameter]: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def facts(self) -> Mapping[str, Any]: ...

    def student(self, x_t: Tensor, t: Tensor, condition: Batch) -> Tensor: ...

    def teacher(self, x_t: Tensor, t: Tensor, condition: Batch) -> Tensor: ...


class Batch:
    """Samples of one shape, stacked on a device."""

    def __init__(self, samples: list[Sample], device: torch.device) -> None:
        def stack(name: str) -> Any:
            tensors = [getattr(sample, name) for sample in samples]
            return None if tensors[0] is None else torch.stack(tensors).to(device)

        self.latent: Tensor = stack("latent")
        self.text: Tensor = stack("text")
        self.image_latent: Tensor | None = stack("image_latent")
        self.image_embedding: Tensor | None = stack("image_embedding")


class WanPair:
    """Diffusers' WanTransformer3DModel as student and teacher.

    Low-rank: one model; the teacher is it with the factors off and dense attention. Full: the teacher is a
    frozen copy in the computing dtype. In a process group FSDP2 shards both.
    attention: switches the student's self-attention between sparse and dense. compiled: whether the blocks of
    both are, which needs a C compiler.
    """

    def __init__(self, options: TrainOptions, device: torch.device) -> None:
        dtype = DTYPES[options.dtype]
        full = options.student == FULL
        self.device = device
        self.facts = {"model": read_config(options.base)}
        self._dtype = dtype
        model = load_transformer(options.base, torch.float32 if full else dtype)
        if full:
            chosen = {
                name: weight
                for name, weight in model.named_parameters()
                if options.parameters != SELF_ATTENTION or ".attn1." in name
            }
            for weight in chosen.values():
                weight.requires_grad_(True)
            self._frozen: nn.Module | None = load_transformer(options.teacher or options.base, dtype)
            # Never sparse, but its dense attention too is by our kernel where that is the fastest.
            teaching = SparseSelfAttention(self._frozen, options.config)
            teaching.active = False
        else:
            add_factors(model, options)
            self._frozen = teaching = None
        self.attention = SparseSelfAttention(model, options.config)
        self.compiled = options.compile and can_compile(device)
        if self.compiled:
            for attention in filter(None, (self.attention, teaching)):
                attention.compile(BACKEND)
        if options.checkpointing:
            model.enable_gradient_checkpointing()  # type: ignore[operator]
        self._model = _place(model, device, dtype)
        if self._frozen is not None:
            self._frozen = _place(self._frozen, device, dtype)
        check_attention(device, dtype, self.facts["model"]["attention_head_dim"])
        self.trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}

    def student(self, x_t: Tensor, t: Tensor, condition: Batch) -> Tensor:
        return self._velocity(self._model, x_t, t, condition)

    @torch.no_grad()
    def teacher(self, x_t: Tensor, t: Tensor, condition: Batch) -> Tensor:
        if self._frozen is not None:
            return self._velocity(self._frozen, x_t, t, condition)
        with self.attention.dense(), self._without_factors():
            return self._velocity(self._model, x_t, t, condition)

    def _velocity(self, model: nn.Module, x_t: Tensor, t: Tensor, condition: Batch) -> Tensor:
        if condition.image_latent is not None:
            x_t = torch.cat((x_t, condition.image_latent), dim=1)
        # FSDP2 hands out weights in the computing dtype; autocast does where a process is on its own.
        alone = not dist.is_initialized() and self._dtype != torch.float32
        with torch.autocast(self.device.type, self._dtype) if alone else nullcontext():
            image = condition.image_embedding
            (velocity,) = model(
                x_t.to(self._dtype),
                t * MODEL_STEPS,
                condition.text.to(self._dtype),
                None if image is None else image.to(self._dtype),
                return_dict=False,
            )
        return velocity

    @contextmanager
    def _without_factors(self) -> Iterator[None]:
        self._switch_factors(False)
        try:
            yield
        finally:
            self._switch_factors(True)

    def _switch_factors(self, on: bool) -> None:
        from peft.tuners.tuners_utils import BaseTunerLayer

        for module in self._model.modules():
            if isinstance(module, BaseTunerLayer):
                module.enable_adapters(on)
        # peft freezes factors that are off, and FSDP2 asks once, at a forward, whether a weight is trained.
        for weight in self.trained.values():
            weight.requires_grad_(True)


def add_factors(model: nn.Module, options: TrainOptions) -> None:
    """Put peft's low-rank factors, fp32, beside the linear layers of `model`: the adapter's, or new ones.

    New ones are drawn from the run's seed, so that every process has the same.
    """
    from peft import LoraConfig
    from peft.tuners.tuners_utils import BaseTunerLayer

    names = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and name.startswith("blocks.")
        and (options.parameters != SELF_ATTENTION or ".attn1." in name)
    ]
    alpha: Any = options.alpha  # a float serves, whatever peft's hint says
    settings = LoraConfig(r=options.rank, lora_alpha=alpha, target_modules=names)
    model.add_adapter(settings, ADAPTER)  # type: ignore[operator]
    layers: list[Any] = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer.cast_input_dtype_enabled = False  # autocast and FSDP2 see to dtypes, without fp32 copies of x
    given = None if options.adapter is None else read_factors(options.adapter, options)
    position = 0
    for name, weight in model.named_parameters():
        if not weight.requires_grad:
            continue
        weight.data = weight.data.float()
        if given is not None:
            weight.data.copy_(given[name])
        elif ".lora_A." in name:
            bound = weight.shape[1] ** -0.5
            weight.data.uniform_(-bound, bound, generator=generator(options.seed, INITIAL, position))
            position += 1


def read_factors(path: Path, options: TrainOptions) -> dict[str, Tensor]:
    """A low-rank student's factors by peft's names, scaled for `options`; DistillError if they do not fit."""
    student, shapes = _adapter(path, options.base)
    parameters = {f"{name}.weight" for name in linear_names(shapes, options.parameters)}
    held = {name.target for name in student.names.values()}
    wan_to_diffusers = {name.target: key for key in shapes if (name := DIFFUSERS.parse(key)) is not None}
    wanted = {name.target for key in parameters if (name := DIFFUSERS.parse(key)) is not None}
    if held != wanted:
        raise DistillError(
            f"The adapter {path.name} changes {len(held)} parameters and this run {len(wanted)}: set "
            "parameters to what the adapter was trained with."
        )
    factors: dict[str, Tensor] = {}
    alphas: dict[str, float] = {}
    with safe_open(path, framework="pt") as file:
        for key, name in student.names.items():
            tensor = file.get_tensor(key).float()
            if name.role is Role.ALPHA:
                alphas[name.target] = float(tensor)
                continue
            module = wan_to_diffusers[name.target].removesuffix(".weight")
            factor = "lora_A" if name.role is Role.DOWN else "lora_B"
            factors[f"{module}.{factor}.{ADAPTER}.weight"] = tensor
            rank = tensor.shape[0 if name.role is Role.DOWN else 1]
            if rank != options.rank:
                raise DistillError(f"The adapter {path.name} has rank {rank}, and rank is {options.rank}.")
    for target in held:
        alpha = alphas.get(target, student.alpha if student.alpha is not None else float(options.rank))
        if alpha != options.alpha:
            module = wan_to_diffusers[target].removesuffix(".weight")
            factors[f"{module}.lora_B.{ADAPTER}.weight"] *= alpha / options.alpha
    return factors


def _adapter(path: Path, base: Path) -> tuple[Any, dict[str, tuple[int, ...]]]:
    """The low-rank student for `base` in the file, and the base's shapes by diffusers' names."""
    shapes = parameter_shapes(base)
    try:
        student = read_student(path)
        if student.kind != LOW_RANK_FILE:
            raise DistillError(f"The adapter {path.name} is a {student.title}; it must be a low-rank file.")
        named = ((DIFFUSERS.parse(key), shape) for key, shape in shapes.items())
        check_base(student, {name.target: shape for name, shape in named if name is not None})
    except FileNotFoundError:
        raise DistillError(f"There is no adapter {path}.") from None
    except StudentError as error:
        raise DistillError(f"The adapter cannot be used: {error}") from None
    return student, shapes


def parameter_shapes(base: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of a model's parameters by diffusers' names, from its config alone."""
    from diffusers import WanTransformer3DModel

    with torch.device("meta"):
        model: Any = WanTransformer3DModel(**read_config(base))
    return {name: tuple(weight.shape) for name, weight in model.named_parameters()}


def linear_names(shapes: Mapping[str, tuple[int, ...]], parameters: str) -> list[str]:
    """Linear layers of the blocks, all or those of self-attention, among parameters of these shapes."""
    return [
        name.removesuffix(".weight")
        for name, shape in shapes.items()
        if name.startswith("blocks.")
        and name.endswith(".weight")
        and len(shape) == 2
        and (parameters != SELF_ATTENTION or ".attn1." in name)
    ]


def _place(model: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """`model` on the device, to compute in `dtype`; in a process group sharded by FSDP2, block by block."""
    if not dist.is_initialized():
        for module in model.modules():
            if type(module) is nn.RMSNorm:
                # Not another forward: the compiler would take each for a case of its own.
                module.__class__ = _Norm
        return model.to(device)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model.to(device)


class _Norm(nn.RMSNorm):
    """The norm in x's dtype: autocast leaves its weight in fp32, for which torch has no fused kernel."""

    def forward(self, x: Tensor) -> Tensor:
        weight = None if self.weight is None else self.weight.to(x.dtype)
        return nn.functional.rms_norm(x, self.normalized_shape, weight, self.eps)


def check_fit(options: TrainOptions, data: Dataset) -> None:
    """DistillError when base, teacher, adapter and samples do not belong together; reads no weights."""
    try:
        model = read_config(options.base)
        teacher = read_config(options.teacher) if options.teacher else model
    except ValueError as error:
        raise DistillError(str(error)) from None
    if unlike := differences(teacher, model):
        raise DistillError(
            f"The teacher {options.teacher} and the base {options.base} are different models ({unlike}); a "
            "student learns from the model that it was made from, or from one of the same shape."
        )
    if model["pos_embed_seq_len"] is not None:
        raise DistillError(f"{options.base} is a first-last-frame model, which cannot be distilled here yet.")
    if options.adapter is not None:
        _adapter(options.adapter, options.base)
    check_data(options, data, model)


def check_data(options: TrainOptions, data: Dataset, model: Mapping[str, Any]) -> None:
    """DistillError unless the samples serve a run with these options and a model with these config fields."""
    _check_samples(data, model)
    if options.micro_batch > 1 and len(data.resolutions) > 1:
        listed = ", ".join(f"{count} of {size}" for size, count in data.resolutions.items())
        raise DistillError(
            f"The samples in {data.folder} have different sizes ({listed}), and micro_batch is "
            f"{options.micro_batch}: set it to 1, or keep each size in a folder of its own."
        )
    if options.held_out >= len(data):
        raise DistillError(
            f"held_out is {options.held_out} and {data.folder} has {len(data)} samples, so none is left to "
            "train on. Add samples or hold out fewer."
        )


def check_attention(device: torch.device, dtype: torch.dtype, head_dim: int) -> None:
    """DistillError, with the reasons, where attention with gradients would run dense without a word."""
    q = torch.zeros(1, 1, BLOCK_Q, head_dim, device=device, dtype=dtype, requires_grad=True)
    choice = choose(q, q, q)
    if choice.name == "dense":
        raise DistillError(
            f"Sparse attention cannot be trained here in {dtype} with a head dim of {head_dim}: {choice.why}."
        )


def can_compile(device: torch.device) -> bool:
    """Whether torch can compile for the device; a warning says why not, as it does without a C compiler."""
    try:
        torch.compile(lambda x: x.sin() + 1, backend=BACKEND)(torch.zeros(64, device=device))
    except Exception as error:  # of torch, of Triton or of a compiler: they share no class
        said = str(getattr(error, "inner_exception", error)).strip()  # a backend's comes wrapped
        reason = said.splitlines()[0] if said else type(error).__name__
        log.warning(
            "compile is on, but torch cannot compile here, so the blocks run as they are, slower: install a "
            "C compiler (gcc or g++), or leave compile out (%s).",
            reason,
        )
        return False
    return True


def _check_samples(data: Dataset, model: Mapping[str, Any]) -> None:
    """DistillError unless the samples are of the kind that `model`, a config's fields, takes."""
    image_channels = model["in_channels"] - model["out_channels"]
    wanted = {"latent": model["out_channels"], "text": model["text_dim"]}
    if image_channels:
        wanted["image_latent"] = image_channels
    if model["image_dim"]:
        wanted["image_embedding"] = model["image_dim"]
    height, width = model["patch_size"][1:]
    for entry in data.entries:
        if (found := entry.widths) != wanted:
            raise DistillError(
                f"The sample {entry.file} does not fit the base: its channels and widths are {found}, and "
                f"the model takes {wanted}. Save samples from a run of the same kind of model."
            )
        size = entry.shapes["latent"]
        if size[2] % height or size[3] % width:
            raise DistillError(
                f"The sample {entry.file} has a latent of {size[2]} × {size[3]}, which the model's patches "
                f"of {height} × {width} do not divide."
            )
