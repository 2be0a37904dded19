"""From a student's file to what ComfyUI's loaders take: names change, tensors are neither copied nor read."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from . import keys as wan
from .header import AGAIN, refusal
from .keys import Name, Role
from .students import FULL, QUANTISATION_METADATA, Student, read_student, size_name, some, width


def load_student(path: Path | str) -> tuple[Student, dict[str, Tensor]]:
    """The student in a file, and its tensors under ComfyUI's names, mapped from the file: read when used."""
    student = read_student(path)
    with safe_open(student.path, framework="pt") as file:
        return student, convert(student, {key: file.get_tensor(key) for key in student.names})


def convert(student: Student, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a student's file under ComfyUI's names; `tensors` is emptied.

    Those are Wan's own names for a full model, and those of ComfyUI's patches for a diff or a low-rank file.
    As no tensor is copied or read, a file mapped into memory stays on disk until its weights are used.
    """
    out: dict[str, Tensor] = {}
    for key in list(tensors):
        tensor = tensors.pop(key)
        if key in student.names:
            out[_comfy_name(student, student.names[key])] = tensor
    if student.alpha is not None:
        for name in student.names.values():
            if name.role is Role.UP:
                out.setdefault(patch_name(name.target, Role.ALPHA), torch.tensor(student.alpha))
    return out


def _comfy_name(student: Student, name: Name) -> str:
    if student.kind == FULL:
        return name.target
    return patch_name(name.target, Role.SET if name.role is Role.VALUE else name.role)


def patch_name(target: str, role: Role) -> str:
    """ComfyUI's name of a patch, or of its part `role`, for the parameter with Wan's name `target`."""
    return f"diffusion_model.{target.removesuffix('.weight')}{role.value}"


def convert_metadata(student: Student) -> dict[str, str]:
    """Metadata that ComfyUI's loader needs beside the tensors: how layers, by Wan's names, are quantised."""
    text = student.metadata.get(QUANTISATION_METADATA)
    if text is None:
        return {}
    scheme = next(scheme for scheme in wan.SCHEMES if scheme.name == student.scheme)
    try:
        content = json.loads(text)
        layers = {}
        for layer, settings in content["layers"].items():
            name = scheme.parse(f"{layer}.weight")
            layers[name.target.removesuffix(".weight") if name else layer] = settings
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise refusal(student.path, f"has damaged metadata, {QUANTISATION_METADATA}", AGAIN) from None
    return {QUANTISATION_METADATA: json.dumps({**content, "layers": layers})}


def check_base(student: Student, base: Mapping[str, tuple[int, ...]]) -> None:
    """StudentError unless a diff or a low-rank file fits its base.

    base: shapes of the base model's parameters by Wan's names.
    """
    is_what = f"is a {student.title}, but"
    connect = "Connect the model that it was distilled from"
    dim, layers = width(base), wan.count_blocks(base)
    if dim is None:
        raise refusal(student.path, f"{is_what} its base is no Wan model", f"{connect}.", "a Wan model")
    if (student.dim is not None and student.dim != dim) or student.layers > layers:
        raise refusal(
            student.path,
            f"{is_what} its base is Wan {size_name(dim, layers)}",
            f"{connect}.",
            f"a base of Wan {size_name(student.dim, student.layers)}",
        )
    absent = sorted({name.target for name in student.names.values()} - base.keys())
    factored = {name.target for name in student.names.values() if name.role in wan.LOW_RANK}
    unlike = sorted(
        target
        for target, shape in student.shapes.items()
        if target in base and not _fits(shape, base[target], factored=target in factored)
    )
    findings = [
        f"{len(found)} of its parameters {what} ({some(found)})"
        for found, what in ((absent, "are not in its base"), (unlike, "have another shape in its base"))
        if found
    ]
    if findings:
        raise refusal(
            student.path,
            f"{is_what} {' and '.join(findings)}",
            f"{connect}; those for text, images and control differ.",
            "a base that has all parameters that it changes",
        )


def _fits(shape: tuple[int, ...], base: tuple[int, ...], *, factored: bool) -> bool:
    """Whether a change of this shape can be added. The product of a low-rank pair is brought into shape."""
    if not factored:
        return shape == base
    return (math.prod(shape), shape[:1]) == (math.prod(base), base[:1])
