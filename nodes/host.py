"""Everything that this pack knows of ComfyUI's internals, in one place. Read and tried on ComfyUI 0.30.0.

Wan's self- and cross-attention go through one function with the same arguments, and their shapes can be
equal. So the patch sits on `self_attn.forward` of each block: it calls the forward that was there before,
with a copy of `transformer_options` in which our override stands and which nothing else of the model sees. An
object patch belongs to the clone of the model and goes with it, and torch.compile notices it, as it does not
notice a change in `transformer_options`: ComfyUI's compile node drops those guards.
"""

from __future__ import annotations

import functools
import logging
import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from comfy.ldm.flux.layers import EmbedND
from comfy.ldm.wan import model as wan_model
from comfy.ldm.wan.model import WanI2VCrossAttention, WanModel, WanT2VCrossAttention
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import CallbacksMP, WrappersMP
from comfy_execution.progress import get_progress_state
from torch import Tensor

from ..sparge_core import SparseConfig
from ..sparge_core.record import Grid
from ..sparge_core.tune import Identity
from ..sparge_core.wan.keys import model_type, strip
from . import exact, feedforward, traced
from .attention import Call, Layer, Run, SparseAttention
from .fused import OVERRIDE, fuse

log = logging.getLogger(__name__)

KEY = "sparge_attention2"  # of our callbacks, wrappers and attachments on a model
STUDENT = "sparge_attention2.student"  # attachment: the SparseConfig that the weights were fine-tuned with
STUDENT_FILE = "sparge_attention2.student_file"  # attachment: where they are from, with or without settings
PROBE = "sparge_attention2.probe"  # attachment: at how many steps to compare sparse with dense attention
CALIBRATE = "sparge_attention2.calibrate"  # attachment: at how many steps to measure settings for a tuning
HOST_OPTIONS = "sparge_attention2.host_options"  # in our copy of transformer_options: the original

# What ComfyUI's attention functions take after q, k, v and heads, in that order.
POSITIONAL = ("mask", "attn_precision", "skip_reshape", "skip_output_reshape")
# Keywords that are handled here or change nothing: softmax is fp32 whatever attn_precision asks for.
UNDERSTOOD = {*POSITIONAL, "transformer_options", "scale", "enable_gqa", "_inside_attn_wrapper"}
PLAIN = {"transformer_options", "_inside_attn_wrapper"}  # all that a model's own self-attention gives

TEXT_ATTENTION = (WanT2VCrossAttention, WanI2VCrossAttention)
APPLY_MODEL = (
    "c_concat",
    "c_crossattn",
    "control",
    "transformer_options",
)  # after x and sigma, in that order
BLOCK = "diffusion_model."  # in front of the names of a model's blocks
BELOW = "sparge_attention2_below"  # on our forward: the other node's patch under it, or None
TARGET = "sparge_attention2_target"  # on our override: keeps alive what a compiled graph calls
FINGERPRINT_VALUES = 64


def self_attention_layers(model: ModelPatcher) -> tuple[Layer, ...]:
    """The self-attentions of a Wan model in the order in which they run; ValueError for any other model."""
    wan = model.get_model_object("diffusion_model")
    wan = getattr(wan, "_orig_mod", wan)  # a node may have put torch.compile's wrapper in its place
    if not isinstance(wan, WanModel):
        raise ValueError(
            f"SpargeAttention2 works on Wan video models, and this model is a {type(wan).__name__}; "
            "connect the MODEL output of a node that loads Wan2.1 or Wan2.2."
        )
    fed_by = {vace: block for block, vace in getattr(wan, "vace_layers_mapping", {}).items()}
    names = []
    for block in range(len(wan.blocks)):
        names.append(Layer(f"blocks.{block}", block))
        names += [Layer(f"vace_blocks.{vace}", block) for vace, fed in fed_by.items() if fed == block]
    missing = [layer.name for layer in names if not hasattr(_own(model, BLOCK + layer.name), "self_attn")]
    if missing or not names:
        raise ValueError(
            "SpargeAttention2 patches self_attn in each block of a Wan model, and this "
            f"{type(wan).__name__} has {f'none in {missing[0]}' if missing else 'no blocks'}; put the node "
            "directly behind the one that loads the model."
        )
    return tuple(names)


def identity(model: ModelPatcher) -> Identity:
    """What a tuning of this Wan model names it by."""
    wan = model.get_model_object("diffusion_model")
    wan = getattr(wan, "_orig_mod", wan)
    names = {strip(name) for name, _ in wan.named_parameters()}
    kind = model_type(names, wan.in_dim, wan.out_dim * math.prod(wan.patch_size))
    return Identity(kind, wan.dim, wan.num_heads, len(wan.blocks))


def student_config(model: ModelPatcher) -> SparseConfig | None:
    """Settings that the model's weights were fine-tuned with, if a loader left them."""
    return model.get_attachment(STUDENT)


def student_file(model: ModelPatcher) -> str | None:
    """Name of the student's file that the model's weights are from, if a loader of ours left it."""
    return model.get_attachment(STUDENT_FILE)


def patch_self_attention(
    model: ModelPatcher, attention: SparseAttention, node_id: str | None = None
) -> ModelPatcher:
    """A clone of `model` with `attention` as its self-attention, in place of an earlier patch of ours.

    node_id: the node on which a browser shows how a run goes on.
    """
    patched = model.clone()
    for layer in attention.layers:
        _install(patched, attention, layer)
        _install_exact(patched, attention, layer)
        _install_feedforward(patched, attention, layer)
    _install_rotation(patched)
    patched.set_attachments(KEY, attention)
    for wrapped in (WrappersMP.OUTER_SAMPLE, WrappersMP.APPLY_MODEL):
        patched.remove_wrappers_with_key(wrapped, KEY)
    for called in (CallbacksMP.ON_CLONE, CallbacksMP.ON_PRE_RUN):
        patched.remove_callbacks_with_key(called, KEY)
    around_run = _around_run(attention, student_file(model), node_id)
    patched.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, KEY, around_run)
    patched.add_wrapper_with_key(WrappersMP.APPLY_MODEL, KEY, _around_step(attention, node_id))
    patched.add_callback_with_key(CallbacksMP.ON_CLONE, KEY, _follow_weights)
    patched.add_callback_with_key(CallbacksMP.ON_PRE_RUN, KEY, _warn_without_run(attention))
    return patched


def patch_of(model: ModelPatcher) -> SparseAttention | None:
    """What `patch_self_attention` put on this model or on one that it is a clone of."""
    return model.get_attachment(KEY)


def probe(model: ModelPatcher, steps: int) -> ModelPatcher:
    """A clone of `model` whose runs compare sparse with dense attention at so many steps, once patched."""
    probed = model.clone()
    probed.set_attachments(PROBE, steps)
    return probed


def calibrate(model: ModelPatcher, steps: int) -> ModelPatcher:
    """A clone of `model` whose runs, once patched, are dense and measure settings at so many steps."""
    calibrated = model.clone()
    calibrated.set_attachments(CALIBRATE, steps)
    return calibrated


def find_run(attention: SparseAttention, latent: Any) -> tuple[Run | None, bool]:
    """The kept run that made this latent and True, or the latest one, if any, and False."""
    wanted = fingerprint(latent)
    for run in reversed(attention.runs):
        if run.latent is not None and wanted is not None and _same(run.latent, wanted):
            return run, True
    return (attention.runs[-1] if attention.runs else None), False


def fingerprint(latent: Any) -> Tensor | None:
    """Shape and a few values by which a sampler's result is known again; None for what is no tensor."""
    if not isinstance(latent, Tensor) or latent.numel() == 0:
        return None
    values = latent.detach().reshape(-1)
    chosen = torch.linspace(0, values.numel() - 1, FINGERPRINT_VALUES, dtype=torch.float64).long()
    shape = torch.tensor([*latent.shape], dtype=torch.float32)
    return torch.cat([shape, values[chosen.to(values.device)].float().cpu()])


def show_text(node_id: str | None, text: str) -> None:
    """Show text under a node in the browser; without a server or a graph, nowhere."""
    if node_id is None:
        return
    from server import PromptServer  # which is only there where ComfyUI's server runs

    server = getattr(PromptServer, "instance", None)
    if server is not None:
        server.send_progress_text(text, node_id)


def show_progress(node_id: str | None, run: Run) -> None:
    """Show on a node how a run goes on: a bar and one line. Waits for no device."""
    if node_id is not None:
        get_progress_state().update_progress(node_id, run.step + 1, run.steps)
        show_text(node_id, run.status)


def end_progress(node_id: str | None) -> None:
    """Take the bar away; the line stays."""
    if node_id is not None:
        get_progress_state().finish_progress(node_id)


def _same(one: Tensor, other: Tensor) -> bool:
    # ComfyUI may hand latents on in fp16.
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-2, atol=1e-2, equal_nan=True)


# ------------------------------------------------------------------------------------------------------------
# On the model


def _key(layer: Layer) -> str:
    return f"{BLOCK}{layer.name}.self_attn.forward"


def _own(model: ModelPatcher, name: str) -> Any:
    """What `name` is in this clone: patched by it or as it was loaded, whatever a clone that ran put there.

    ComfyUI's own get_model_object knows of a patch of `name`, but not of one of a module that it is in.
    """
    for end in range(len(name), 0, -1):
        if end < len(name) and name[end] != ".":
            continue
        for patches in (model.object_patches, model.object_patches_backup):
            if name[:end] in patches:
                found = patches[name[:end]]
                return operator.attrgetter(name[end + 1 :])(found) if end < len(name) else found
    return operator.attrgetter(name)(model.model)


def _install(model: ModelPatcher, attention: SparseAttention, layer: Layer) -> None:
    """Put our forward over what the layer has, another node's patch or the model's own; ours are replaced."""
    key = _key(layer)
    below = model.object_patches.pop(key, None)
    if _is_ours(below):
        below = getattr(below, BELOW)
    forward = _own(model, key) if below is None else below
    model.add_object_patch(key, _make_forward(forward, below, _make_override(attention, layer)))


def _make_forward(
    forward: Callable[..., Tensor], below: Any, override: Callable[..., Tensor]
) -> Callable[..., Tensor]:
    fused = fuse(forward) if below is None else None

    def sparse_forward(
        *args: Any, transformer_options: dict[str, Any] | None = None, **kwargs: Any
    ) -> Tensor:
        given = transformer_options or {}
        ours = {**given, OVERRIDE: override, HOST_OPTIONS: given}
        patched = "attn1_patch" in given.get("patches", ())
        alone = not patched and OVERRIDE not in given and not kwargs
        if alone and fused is not None and len(args) == 2:
            x, freqs = args
            if fused.serves(x, freqs):
                return fused.forward(x, freqs, ours)
        out = forward(*args, transformer_options=ours, **kwargs)
        if patched:  # such a patch may leave something for those behind it
            _hand_back(ours, given)
        return out

    setattr(sparse_forward, BELOW, below)
    return sparse_forward


def _hand_back(ours: dict[str, Any], given: dict[str, Any]) -> None:
    """Take over what the layer and its patches changed in our copy of the host's options."""
    changed = {key: value for key, value in ours.items() if key not in (OVERRIDE, HOST_OPTIONS)}
    if OVERRIDE in given:
        changed[OVERRIDE] = given[OVERRIDE]
    given.clear()
    given.update(changed)


def _unpatched(model: ModelPatcher, key: str) -> Callable[..., Tensor] | None:
    """The model's own forward under `key`, a patch of ours taken off; None if another node has patched it."""
    if _is_ours(model.object_patches.get(key)):
        del model.object_patches[key]
    return None if key in model.object_patches else _own(model, key)


def _install_exact(model: ModelPatcher, attention: SparseAttention, layer: Layer) -> None:
    """Let the layer's attention to the text run by our kernel, unless another node has patched it."""
    key = f"{BLOCK}{layer.name}.cross_attn.forward"
    forward = _unpatched(model, key) if hasattr(_own(model, BLOCK + layer.name), "cross_attn") else None
    if forward is None or not attention.settings.may_use_cuda:
        return
    if type(getattr(forward, "__self__", None)) in TEXT_ATTENTION:
        model.add_object_patch(key, _make_exact_forward(forward, attention, layer))


def _make_exact_forward(
    forward: Callable[..., Tensor], attention: SparseAttention, layer: Layer
) -> Callable[..., Tensor]:
    target = traced.Target(_make_dense(attention, layer))
    number = target.number

    def override(
        func: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, heads: int, *args: Any, **kwargs: Any
    ) -> Tensor:
        kwargs["transformer_options"] = kwargs["transformer_options"][HOST_OPTIONS]
        plain = not args and kwargs.keys() <= PLAIN and not torch.is_grad_enabled()
        if plain and torch.compiler.is_compiling():
            return traced.attend(q, k, v, heads, number)
        if plain and exact.serves(func, q, k, v, heads):
            return exact.attend(q, k, v, heads)
        return func(q, k, v, heads, *args, **kwargs)

    def exact_forward(*args: Any, transformer_options: dict[str, Any] | None = None, **kwargs: Any) -> Tensor:
        given = transformer_options or {}
        if OVERRIDE in given:
            return forward(*args, transformer_options=given, **kwargs)
        ours = {**given, OVERRIDE: override, HOST_OPTIONS: given}
        return forward(*args, transformer_options=ours, **kwargs)

    setattr(exact_forward, BELOW, None)
    setattr(override, TARGET, target)
    return exact_forward


def _install_feedforward(model: ModelPatcher, attention: SparseAttention, layer: Layer) -> None:
    """Let the layer's GELU be part of a matrix product, unless another node has patched it."""
    key = f"{BLOCK}{layer.name}.ffn.forward"
    forward = _unpatched(model, key) if hasattr(_own(model, BLOCK + layer.name), "ffn") else None
    if forward is None or not attention.settings.may_use_cuda:
        return
    if (fused := feedforward.fuse(forward)) is not None:
        setattr(fused, BELOW, None)
        model.add_object_patch(key, fused)


def _install_rotation(model: ModelPatcher) -> None:
    """Let torch.compile take the table of rotations as it is.

    It would compute every number of it from a power in float64: 5 % of a step of the 1.3B model on an H200.
    """
    key = f"{BLOCK}rope_embedder.forward"
    forward = _unpatched(model, key)
    embedder: Any = getattr(forward, "__self__", None)
    if forward is not None and type(embedder) is EmbedND:
        model.add_object_patch(key, _make_rotation(forward, sum(embedder.axes_dim) // 2))


def _make_rotation(forward: Callable[[Tensor], Tensor], pairs: int) -> Callable[[Tensor], Tensor]:
    target = traced.Target(forward)
    number = target.number

    def rotation(ids: Tensor) -> Tensor:
        if torch.compiler.is_compiling() and ids.dim() == 3:
            return traced.rotate(ids, pairs, number)
        return forward(ids)

    setattr(rotation, BELOW, None)
    setattr(rotation, TARGET, target)
    return rotation


def _is_ours(forward: Any) -> bool:
    return hasattr(forward, BELOW)


def _follow_weights(old: ModelPatcher, new: ModelPatcher) -> None:
    """A clone may load the weights anew (for torch.compile, for more GPUs): our forwards must call those."""
    attention = patch_of(new)
    if new.model is old.model or attention is None:
        return
    for layer in attention.layers:
        if _is_ours(new.object_patches.get(_key(layer))):
            _install(new, attention, layer)
        _install_exact(new, attention, layer)
        _install_feedforward(new, attention, layer)
    _install_rotation(new)


def _around_run(attention: SparseAttention, student: str | None, node_id: str | None) -> Callable[..., Any]:
    """student: the file of the model's weights when it was patched, if they were a student's."""

    def around_run(
        executor: Any, noise: Any, latent: Any, sampler: Any, sigmas: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        model = executor.class_obj.model_patcher
        # Asked for now and not when the node ran: a node behind ours may have shifted the schedule.
        percent_to_sigma = model.get_model_object("model_sampling").percent_to_sigma
        policy = attention.settings.policy
        window = (float(percent_to_sigma(policy.start_percent)), float(percent_to_sigma(policy.end_percent)))
        covered = [layer for layer in attention.layers if not _is_ours(model.object_patches.get(_key(layer)))]
        now = student_file(model)
        with attention.run(sigmas.tolist(), window, covered, model.load_device, now is not None) as run:
            if now != student:
                run.note(
                    f"the student {now} was loaded behind the SpargeAttention2 node, which therefore does "
                    "not know its settings; put the SpargeAttention2 node behind the one that loads it"
                )
            run.probe(model.get_attachment(PROBE) or 0)
            if count := model.get_attachment(CALIBRATE):
                run.calibrate(count, model.load_device)
            try:
                result = executor(noise, latent, sampler, sigmas, *args, **kwargs)
            finally:
                end_progress(node_id)
            run.latent = fingerprint(result)
        show_text(node_id, run.status)
        return result

    return around_run


def _around_step(attention: SparseAttention, node_id: str | None) -> Callable[..., Any]:
    def around_step(executor: Any, x: Any, sigma: Tensor, *args: Any, **kwargs: Any) -> Any:
        run = attention.current
        if run is None:  # the model is used outside of a sampler
            return executor(x, sigma, *args, **kwargs)
        grid = _grid(executor.class_obj.diffusion_model, x)
        run.begin_step(float(sigma.flatten()[0]), _options(args, kwargs), grid)
        result = executor(x, sigma, *args, **kwargs)
        run.end_step()
        show_progress(node_id, run)
        return result

    return around_step


def _grid(wan: WanModel, latent: Tensor) -> Grid | None:
    """Frames, rows and columns of tokens that the model makes of a latent (B, C, T, H, W)."""
    if latent.dim() != 5:  # packed with others of another shape
        return None
    frames, rows, columns = (
        -(-size // side) for size, side in zip(latent.shape[2:], wan.patch_size, strict=True)
    )
    return frames, rows, columns


def _options(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """transformer_options among what apply_model takes after x and sigma."""
    position = APPLY_MODEL.index("transformer_options")
    options: dict[str, Any] = (
        args[position] if len(args) > position else kwargs.get("transformer_options", {})
    )
    return options


def _warn_without_run(attention: SparseAttention) -> Callable[[ModelPatcher], None]:
    """A guider may take a second model, of which ComfyUI calls no wrapper: nothing is known of its steps."""

    def warn(model: ModelPatcher) -> None:
        if attention.current is None:
            log.warning(
                "SpargeAttention2: this sampler uses the model as its second one, so it is sparse at every "
                "step, whatever start_percent and end_percent say, and Sparsity Report has no numbers of it."
            )

    return warn


# ------------------------------------------------------------------------------------------------------------
# In an attention call


def _make_override(attention: SparseAttention, layer: Layer) -> Callable[..., Tensor]:
    target = traced.Target(_make_target(attention, layer))
    number, may_use_cuda = target.number, attention.settings.may_use_cuda

    def override(
        func: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, heads: int, *args: Any, **kwargs: Any
    ) -> Tensor:
        if not torch.compiler.is_compiling():
            return eager(func, q, k, v, heads, *args, **kwargs)
        ours = kwargs["transformer_options"]
        given = ours[HOST_OPTIONS]
        plain = not args and kwargs.keys() <= PLAIN and q.shape == k.shape == v.shape
        differentiated = q.requires_grad or k.requires_grad or v.requires_grad
        # Another node's override may read options that only this call has, so it breaks the graph.
        if plain and not differentiated and OVERRIDE not in given:
            ours.clear()
            ours.update(given)
            return traced.attend(q, k, v, heads, number)
        return torch.compiler.disable(eager)(func, q, k, v, heads, *args, **kwargs)

    def eager(
        func: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, heads: int, *args: Any, **kwargs: Any
    ) -> Tensor:
        ours = kwargs["transformer_options"]
        given = kwargs["transformer_options"] = ours[HOST_OPTIONS]
        earlier = given.get(OVERRIDE)
        # Self-attention is the first call. What else a patch adds to this layer gets what the host gave.
        ours.clear()
        ours.update(given)

        args_given = (q, k, v, heads, *args)

        plain = not args and kwargs.keys() <= PLAIN

        def dense() -> Tensor:
            if earlier is not None:
                return earlier(func, *args_given, **kwargs)
            if plain and may_use_cuda and exact.serves(func, *args_given):
                return exact.attend(*args_given)
            return func(*args_given, **kwargs)

        named = {**dict(zip(POSITIONAL, args, strict=False)), **kwargs}
        scale = named.get("scale")
        reason = _why_not(q, k, v, named)
        if reason is not None:
            return attention.attend(layer, Call(q, k, v, scale, reason, dense, _as_it_is))
        if not named.get("skip_reshape"):
            q, k, v = (_heads_apart(x, heads) for x in (q, k, v))
        pack = _as_it_is if named.get("skip_output_reshape") else _pack
        return attention.attend(layer, Call(q, k, v, scale, None, dense, pack))

    setattr(override, TARGET, target)
    return override


def _make_target(attention: SparseAttention, layer: Layer) -> Callable[[Tensor, Tensor, Tensor, int], Tensor]:
    dense = _make_dense(attention, layer)

    def run(q: Tensor, k: Tensor, v: Tensor, heads: int) -> Tensor:
        """A call from a compiled graph."""
        views = _heads_apart(q, heads), _heads_apart(k, heads), _heads_apart(v, heads)
        call = Call(*views, None, None, functools.partial(dense, q, k, v, heads), _pack)
        return attention.attend(layer, call)

    return run


def _make_dense(attention: SparseAttention, layer: Layer) -> Callable[[Tensor, Tensor, Tensor, int], Tensor]:
    may_use_cuda = attention.settings.may_use_cuda

    def dense(q: Tensor, k: Tensor, v: Tensor, heads: int) -> Tensor:
        """Dense attention for a compiled graph, which knows the host's options of when it was captured."""
        options = attention.current.options if attention.current is not None else {}
        own = wan_model.optimized_attention
        if may_use_cuda and OVERRIDE not in options and exact.serves(own, q, k, v, heads):
            return exact.attend(q, k, v, heads)
        now = {**options, "block_index": layer.block}
        return own(q, k, v, heads=heads, transformer_options=now)

    return dense


def _heads_apart(tokens: Tensor, heads: int) -> Tensor:
    """(B, L, H * D), seen as (B, H, L, D)."""
    return tokens.unflatten(-1, (heads, -1)).transpose(1, 2)


def _why_not(q: Tensor, k: Tensor, v: Tensor, named: dict[str, Any]) -> str | None:
    """Why a call with these arguments has to be dense, or None."""
    if named.get("mask") is not None:
        return "attention mask"
    # None and False ask for nothing, whatever they are called.
    unknown = [
        name
        for name in named
        if name not in UNDERSTOOD and named[name] is not None and named[name] is not False
    ]
    if unknown:
        return f"unknown attention option {', '.join(sorted(unknown))}"
    if not q.shape == k.shape == v.shape:
        return "queries, keys and values of different shapes"
    return None


def _pack(out: Tensor) -> Tensor:
    """(B, H, L, D) to (B, L, H * D): no copy, because the output has the queries' strides."""
    return out.transpose(1, 2).flatten(2)


def _as_it_is(out: Tensor) -> Tensor:
    return out
