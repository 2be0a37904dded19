"""What this pack knows of how ComfyUI loads and patches weights; the rest is in host.py.

Files are read, models built and patches applied by ComfyUI's own code, so that its memory management, its
number formats and its other nodes work as with its own loaders. Read and tried on ComfyUI 0.30.0.
"""

from __future__ import annotations

import logging
from typing import Any

import comfy.lora
import comfy.sd
import comfy.utils
import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import CallbacksMP
from torch import Tensor
from torch.nn import Module, Parameter

from ..sparge_core.wan import FULL, Student, StudentError, check_base, convert, convert_metadata
from ..sparge_core.wan.header import refusal
from ..sparge_core.wan.keys import QUANTISATION, SCALED_FP8, strip
from ..sparge_core.wan.students import some
from . import host

log = logging.getLogger(__name__)

PREFIX = "diffusion_model."
STRENGTH = 1.0  # of a student's patches: it was distilled at no other


def load(student: Student, base: ModelPatcher | None) -> ModelPatcher:
    """The model of a student: built from its file, or a clone of `base` with its weights changed.

    StudentError when they do not fit; `base` is left as it was. The student's settings are attached.
    """
    if student.kind == FULL:
        model = load_full(student)
    elif base is None:
        raise StudentError(
            f"{student.path.name} is a {student.title}, which changes a base model, and none is connected; "
            "expected the model that it was distilled from. Load that model and connect it to the input base."
        )
    else:
        model = _patch(student, base)
    _attach(model, student)
    return model


def load_full(student: Student, disable_dynamic: bool = False) -> ModelPatcher:
    """ComfyUI's model from a full model's file. disable_dynamic: as ComfyUI's loaders take it."""
    metadata = convert_metadata(student)
    tensors = convert(student, _read(student))
    # On the meta device, names and shapes without data, because the loader empties what it gets.
    given = {name: tensor.to("meta") for name, tensor in tensors.items()}
    try:
        model = comfy.sd.load_diffusion_model_state_dict(
            tensors, metadata=metadata, disable_dynamic=disable_dynamic
        )
    except RuntimeError as error:
        if "loading state_dict" not in str(error):
            raise
        reason = str(error).split("\n", 1)[-1].strip().split("\n")[0]
        raise _unfit(student, f"but its shapes are not those of that model ({reason})") from None
    except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise _unfit(student, f"but ComfyUI cannot build a model from it ({reason})") from None
    if model is None:
        raise _unfit(student, "but ComfyUI has no model like it")
    _check_all_loaded(student, model, given)
    # How to load the same weights once more, for another GPU say.
    model.cached_patcher_init = (load_full, (student,))
    return model


def _check_all_loaded(student: Student, model: ModelPatcher, given: dict[str, Tensor]) -> None:
    """What only the file or only the model has, ComfyUI passes over with a line in its log."""
    found = _weights(model.model.model_config.process_unet_state_dict(given))
    wanted = _weights(model.model.diffusion_model.state_dict())
    unknown, missing = sorted(found - wanted), sorted(wanted - found)
    findings = [
        f"{len(names)} of its parameters {what} ({some(names)})"
        for names, what in ((unknown, "are unknown to that model"), (missing, "are missing"))
        if names
    ]
    if findings:
        raise _unfit(student, f"but {' and '.join(findings)}")


def _weights(names: Any) -> set[str]:
    return {name for name in names if name != SCALED_FP8 and name.rsplit(".", 1)[-1] not in QUANTISATION}


def _patch(student: Student, base: ModelPatcher) -> ModelPatcher:
    """A clone of `base` with the patches of a diff or a low-rank file."""
    model = base.get_model_object("diffusion_model")
    check_base(student, {strip(name): tuple(weight.shape) for name, weight in model.named_parameters()})
    names = comfy.lora.model_lora_keys_unet(base.model, {})
    patches = comfy.lora.load_lora(convert(student, _read(student)), names, log_missing=False)
    lone = {key: patches.pop(key) for key in list(patches) if _is_lone(model, key.removeprefix(PREFIX))}
    patched = base.clone()
    applied = {*patched.add_patches(patches, strength_patch=STRENGTH), *lone}
    for key, patch in lone.items():
        weight = base.get_model_object(key)
        copy = weight.detach().to(torch.float32, copy=True)  # it is changed in place
        changed = comfy.lora.calculate_weight([(STRENGTH, patch, 1.0, None, None)], copy, key)
        patched.add_object_patch(key, Parameter(changed.to(weight.dtype), requires_grad=False))
    left = sorted(
        {name.target for name in student.names.values()} - {key.removeprefix(PREFIX) for key in applied}
    )
    if left:
        raise _unfit(student, f"but ComfyUI cannot apply {len(left)} of its patches ({some(left)})")
    return patched


def _is_lone(model: Module, name: str) -> bool:
    """Whether this is a parameter beside submodules with their own, such as `modulation`.

    ComfyUI takes a patch for such a parameter and never applies it, so it becomes an object patch.
    """
    owner = model.get_submodule(name.rpartition(".")[0])
    return any("." in other for other, _ in owner.named_parameters())


def _read(student: Student) -> dict[str, Tensor]:
    """The file's tensors as ComfyUI's own loaders read them: mapped, and known to its memory management."""
    return comfy.utils.load_torch_file(str(student.path))


def _unfit(student: Student, what: str) -> StudentError:
    do = "Get a file that was made for ComfyUI or diffusers, or tell its authors."
    expected = "weights that fit a Wan model exactly"
    return refusal(student.path, f"looks like a {student.title}, {what}", do, expected)


# ----------------------------------------------------------------------------------------------------------
# On the model


def _attach(model: ModelPatcher, student: Student) -> None:
    """Leave the student's settings for our patch, and watch for runs without it."""
    model.set_attachments(host.STUDENT_FILE, student.path.name)
    model.remove_attachments(host.STUDENT)
    if student.config is not None:
        model.set_attachments(host.STUDENT, student.config)
    model.remove_callbacks_with_key(CallbacksMP.ON_PRE_RUN, host.STUDENT)
    model.add_callback_with_key(CallbacksMP.ON_PRE_RUN, host.STUDENT, _warn_if_dense)


def _warn_if_dense(model: ModelPatcher) -> None:
    if host.patch_of(model) is None:
        log.warning(
            "SpargeAttention2: the student %s runs with dense attention, which it was not distilled for; put "
            "a SpargeAttention2 node behind the one that loads it, or the picture will suffer.",
            model.get_attachment(host.STUDENT_FILE),
        )
