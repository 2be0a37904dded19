"""Students: files of distilled Wan weights, told apart by their headers alone.

A student is a full model, a diff against its base, or a low-rank file. `read_student` says what a file is, or
raises one StudentError that says why it cannot be used. It reads the header and nothing behind it, which
takes milliseconds; no file is opened as a pickle, whatever its name.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..config import METADATA_PREFIX, SparseConfig
from . import keys as wan
from .header import AGAIN, CHOOSE, Header, read_header, refusal
from .keys import Name, Role, Size
from .settings import lacking, peft_alpha, settings_of

FULL, DIFF, LOW_RANK = "full model", "diff", "low-rank file"

BASE_METADATA = f"{METADATA_PREFIX}base_model"
QUANTISATION_METADATA = "_quantization_metadata"  # ComfyUI's: JSON with a table of quantised layers, by name
FLOATS_OF_8_BITS = frozenset({"F8_E4M3", "F8_E5M2"})
FLOATS = frozenset({"F64", "F32", "F16", "BF16"}) | FLOATS_OF_8_BITS
PART = re.compile(r"(\d{5})-of-(\d{5})$")
EXAMPLES = 3  # names given of many


@dataclass(frozen=True)
class Student:
    """A file of distilled weights, as its header shows it.

    kind: FULL, DIFF or LOW_RANK.
    scheme: whose names it uses; names: what each of its keys means.
    shapes: of the parameters that it holds or changes, by Wan's names; of a low-rank pair, of its product.
    dim, layers: width and number of blocks, as far as the file shows them.
    size: the published size of that width.
    type: the kind of Wan model, None where the file leaves it open.
    dtype: of most of its bytes, as safetensors names it.
    config: the settings that it was distilled for, if it carries them.
    method: the other method that it is for, if any.
    alpha: of its low-rank pairs without one of their own, where the metadata gives it.
    """

    path: Path
    kind: str
    scheme: str
    names: Mapping[str, Name] = field(repr=False)
    shapes: Mapping[str, tuple[int, ...]] = field(repr=False)
    dim: int | None
    layers: int
    size: Size | None
    type: str | None
    dtype: str
    config: SparseConfig | None
    method: str | None
    alpha: float | None
    metadata: Mapping[str, str] = field(repr=False)

    @property
    def title(self) -> str:
        """What the file is: "low-rank file for Wan 14B (width 5120, 40 blocks), bf16, diffusers names"."""
        title = _title(self.kind, self.dim, self.layers, self.type)
        return f"{title}, {self.dtype.lower()}, {self.scheme} names"

    @property
    def advice(self) -> str:
        """What to know of its base and its settings, in a few sentences."""
        base = self.metadata.get(BASE_METADATA)
        return f"It was distilled from {base}. {self._of_settings()}" if base else self._of_settings()

    def _of_settings(self) -> str:
        if self.config is not None:
            of = f" of {self.method}" if self.method else ""
            return f"Its settings{of}: {_settings(self.config)}. The SpargeAttention2 node uses them on auto."
        ask = "The file carries no settings: set the SpargeAttention2 node to manual"
        if self.method is not None:
            return (
                f"{ask}, with top_k = 1 - the sparsity that its authors name, top_p 0 and sparsity 0: it was "
                f"distilled for the Top-k masks of {self.method}."
            )
        ask += ", with the values that its authors name"
        if self.size is not None and self.size.settings is not None:
            return f"{ask}. The method's own for {self.size.name} are {_settings(self.size.settings)}."
        known = [f"{_settings(size.settings)} for {size.name}" for size in wan.SIZES if size.settings]
        return f"{ask}. The method's own are {' and '.join(known)}; for this size it gives none."


def read_student(path: Path | str) -> Student:
    """What the file at `path` is. StudentError when it cannot be used, OSError when it cannot be read."""
    path = Path(path)
    header = read_header(path)
    keys = _own_keys(header)
    if not keys:
        raise refusal(path, "holds no tensors", AGAIN)
    _check_foreign(path, keys)
    scheme, names = wan.best_scheme(keys)
    _check_wan(path, keys, names)

    targets = {name.target for name in names.values()}
    kind = _kind(names)
    shapes, unpaired = _shapes(header, names)
    dim, layers = width(shapes), wan.count_blocks(targets)
    in_dim, out = _axis(shapes, "patch_embedding.weight", 1), _axis(shapes, "head.head.bias", 0)
    model_type = wan.model_type(targets, in_dim, out)
    meanings = Counter(names.values())
    _check_whole(
        path,
        f"looks like a {_title(kind, dim, layers, model_type)}",
        {
            f"of its {len(keys)} keys are unknown": [key for key in keys if key not in names],
            "keys name a parameter for a second time": [key for key in names if meanings[names[key]] > 1],
            "parameters are changed in two ways": _changed_twice(names),
            "parameters are missing": wan.missing_parameters(targets) if kind == FULL else [],
            "blocks are missing": _missing_blocks(dim, layers) if kind == FULL else [],
            "low-rank pairs are incomplete or do not fit together": unpaired,
            "parameters differ in shape between blocks": _uneven(header, names) if kind == FULL else [],
            "parameters are not of its width": _misfits(header, names, dim) if kind == FULL else [],
        },
    )
    _check_dtypes(path, header, names)
    _check_scales(path, header, names)
    config, method = settings_of(path, header.metadata)
    return Student(
        path=path,
        kind=kind,
        scheme=scheme.name,
        names=names,
        shapes=shapes,
        dim=dim,
        layers=layers,
        size=_size(dim),
        type=model_type,
        dtype=_main_dtype(header, names),
        config=config,
        method=method,
        alpha=peft_alpha(path, header.metadata),
        metadata=header.metadata,
    )


# ----------------------------------------------------------------------------------------------------------
# What the keys say


def _own_keys(header: Header) -> list[str]:
    """The keys without those of other models, where the file is a checkpoint of several."""
    checkpoint = any(key.startswith(wan.CHECKPOINT_PREFIX) for key in header.tensors)
    return [key for key in header.tensors if not (checkpoint and key.startswith(wan.BESIDE))]


def _kind(names: Mapping[str, Name]) -> str:
    roles = {name.role for name in names.values()}
    return LOW_RANK if roles & wan.LOW_RANK else DIFF if roles & {Role.DIFF, Role.SET} else FULL


def _shapes(header: Header, names: Mapping[str, Name]) -> tuple[dict[str, tuple[int, ...]], list[str]]:
    """Shapes of the parameters that a file holds or changes, and those whose low-rank pair is none."""
    shapes: dict[str, tuple[int, ...]] = {}
    factors: dict[str, dict[Role, tuple[int, ...]]] = {}
    for key, name in names.items():
        shape = header.tensors[key].shape
        if name.role in wan.LOW_RANK:
            factors.setdefault(name.target, {})[name.role] = shape
        else:
            shapes[name.target] = shape
    unpaired = []
    for target, pair in factors.items():
        up, down = pair.get(Role.UP, ()), pair.get(Role.DOWN, ())
        alpha = pair.get(Role.ALPHA, ())
        if len(up) > 1 and len(down) > 1 and up[1] == down[0] > 0 and math.prod(alpha) == 1:
            shapes[target] = (up[0], *down[1:])
        else:
            unpaired.append(target)
    return shapes, unpaired


def _changed_twice(names: Mapping[str, Name]) -> list[str]:
    """Parameters with a diff beside their low-rank pair, say, of which ComfyUI would apply one alone."""
    ways = {(name.target, None if name.role in wan.LOW_RANK else name.role) for name in names.values()}
    counts = Counter(target for target, _ in ways)
    return sorted(target for target, count in counts.items() if count > 1)


def width(shapes: Mapping[str, tuple[int, ...]]) -> int | None:
    """The width of a model whose parameters, by Wan's names, have these shapes; None where none shows it."""
    for parameter, axis in wan.WIDTH:
        for target, shape in shapes.items():
            block = wan.BLOCK_NAME.fullmatch(target)
            if block and block[3] == parameter and shape:
                return shape[axis]
    return None


def _axis(shapes: Mapping[str, tuple[int, ...]], target: str, axis: int) -> int | None:
    shape = shapes.get(target, ())
    return shape[axis] if axis < len(shape) else None


def _uneven(header: Header, names: Mapping[str, Name]) -> list[str]:
    """Parameters of another shape than in the first block, packed numbers aside: not all layers have them."""
    first: dict[tuple[str, str], tuple[int, ...]] = {}
    uneven = []
    for key, name in names.items():
        info, block = header.tensors[key], wan.BLOCK_NAME.fullmatch(name.target)
        if not block or info.dtype not in FLOATS or name.target.endswith(wan.QUANTISATION):
            continue
        if first.setdefault((block[1], block[3]), info.shape) != info.shape:
            uneven.append(name.target)
    return uneven


def _misfits(header: Header, names: Mapping[str, Name], dim: int | None) -> list[str]:
    """Parameters whose shapes would let ComfyUI build a model of another width, packed numbers aside."""
    infos = {name.target: header.tensors[key] for key, name in names.items()}
    return [
        target
        for target, axes, widths in wan.SIZING
        if target in infos
        and infos[target].dtype in FLOATS
        and (len(infos[target].shape) != axes or any(infos[target].shape[axis] != dim for axis in widths))
    ]


def _main_dtype(header: Header, names: Mapping[str, Name]) -> str:
    counts: Counter[str] = Counter()
    for key in names:
        info = header.tensors[key]
        counts[info.dtype] += info.end - info.begin
    return counts.most_common(1)[0][0]


# ----------------------------------------------------------------------------------------------------------
# What is refused


def _check_foreign(path: Path, keys: Sequence[str]) -> None:
    """No parameters of other methods."""
    for method in wan.METHODS:
        if method.parameters and (found := [key for key in keys if method.parameters.search(key)]):
            raise lacking(path, method.name, f"{method.has} ({some(found)})")
    if found := [key for key in keys if wan.INTEGER_WEIGHT.search(key)]:
        raise refusal(
            path,
            f"stores {len(found)} weights as 8-bit integers, as TurboDiffusion does ({some(found)})",
            CHOOSE,
        )


def _check_wan(path: Path, keys: Sequence[str], names: Mapping[str, Name]) -> None:
    """Names of Wan's parameters, and none that only another attention has."""
    other = wan.other_model(keys)
    for adapter, pattern in wan.OTHER_ADAPTERS if other is None else ():
        if found := [key for key in keys if pattern.search(key)]:
            do = "Save it as a plain low-rank file or diff."
            raise refusal(path, f"looks like an adapter of another kind, {adapter} ({some(found)})", do)
    if not names and (found := wan.unknown_prefixes(keys)):
        looks = f"has Wan's names behind a prefix unknown here ({some(found)})"
        raise refusal(path, looks, "Save one model of it without what is in front of `blocks`.")
    if not names or (other is not None and 2 * len(names) < len(keys)):
        looks = f"looks like {other}" if other else f"has no key of a Wan model ({some(keys)})"
        raise refusal(path, looks, "Choose a file that was made for Wan2.1 or Wan2.2.")
    added = [key for key in keys if key not in names and wan.IN_SELF_ATTENTION.search(key)]
    if added and len(added) < len(names):
        raise lacking(path, "another method", f"parameters of its own in self-attention ({some(added)})")


def _check_whole(path: Path, looks: str, findings: Mapping[str, Sequence[str]]) -> None:
    """One error, with counts and examples, for a file that matches in part. findings: names by what is so."""
    found = [f"{len(names)} {what} ({some(names)})" for what, names in findings.items() if names]
    if not found:
        return
    do = "Get a complete file that was made for this kind of model, or tell its authors."
    if part := PART.search(path.stem):
        do = f"It is part {int(part[1])} of {int(part[2])} of a model: join the parts into one file first."
    raise refusal(path, f"{looks}, but {' and '.join(found)}", do)


def _check_dtypes(path: Path, header: Header, names: Mapping[str, Name]) -> None:
    """Integers are a weight only where the file says how they are quantised, and no other parameter ever."""
    if QUANTISATION_METADATA in header.metadata:
        return
    targets = {name.target for name in names.values()}
    bare = [
        key
        for key, name in names.items()
        if header.tensors[key].dtype not in FLOATS
        and name.role is not Role.ALPHA
        and name.target.rpartition(".")[2] not in wan.QUANTISATION
        and not any(name.target.removesuffix("weight") + leaf in targets for leaf in wan.QUANTISED)
    ]
    if bare:
        raise refusal(
            path,
            f"stores {len(bare)} weights as {header.tensors[bare[0]].dtype} and no scales ({some(bare)})",
            CHOOSE,
        )


def _check_scales(path: Path, header: Header, names: Mapping[str, Name]) -> None:
    """Scales that ComfyUI would use: it passes over unmarked ones, and fails on misshapen ones in a run."""
    infos = {name.target: header.tensors[key] for key, name in names.items()}
    unmarked, misshapen = [], []
    for key, name in names.items():
        module, _, leaf = name.target.rpartition(".")
        if leaf not in wan.MARKS:
            continue
        mark = wan.MARKS[leaf].format(module)
        if mark not in infos and QUANTISATION_METADATA not in header.metadata:
            unmarked.append(key)
        weight, scale = infos.get(f"{module}.weight"), header.tensors[key]
        # Other formats have a scale for each group of numbers, as 8-bit numbers.
        if weight is None or {weight.dtype, scale.dtype} - FLOATS or scale.dtype in FLOATS_OF_8_BITS:
            continue
        if math.prod(scale.shape) != 1 and scale.shape != weight.shape[:1]:
            misshapen.append(key)
    if unmarked:
        what = f"stores {len(unmarked)} scales of weights, and no mark how to use them ({some(unmarked)})"
        raise refusal(path, what, "Choose its bf16 or fp16 version, or the one that was made for ComfyUI.")
    if misshapen:
        what = f"stores {len(misshapen)} scales of weights, not one each or one a row ({some(misshapen)})"
        raise refusal(path, what, "Choose its bf16 or fp16 version.")


# ----------------------------------------------------------------------------------------------------------
# In words


def some(names: Sequence[str]) -> str:
    """A few of `names`."""
    return ", ".join(names[:EXAMPLES]) + (", …" if len(names) > EXAMPLES else "")


def size_name(dim: int | None, layers: int) -> str:
    """A model's size: "14B (width 5120, 40 blocks)"."""
    size = _size(dim)
    return f"{size.name if size else 'of no published size'} (width {dim or 'unknown'}, {layers} blocks)"


def _size(dim: int | None) -> Size | None:
    return next((size for size in wan.SIZES if size.dim == dim), None)


def _missing_blocks(dim: int | None, layers: int) -> list[str]:
    """Blocks behind the last one of a full model, which ComfyUI would take for a smaller model without."""
    size = _size(dim)
    return [f"blocks.{block}" for block in range(layers, size.layers)] if size is not None else []


def _title(kind: str, dim: int | None, layers: int, model_type: str | None) -> str:
    named = f" {model_type}" if model_type else ""
    return f"{kind} {'of' if kind == FULL else 'for'} Wan{named} {size_name(dim, layers)}"


def _settings(config: SparseConfig) -> str:
    target = f", sparsity {config.sparsity:g}" if config.sparsity else ""
    return f"top_k {config.top_k:g}, top_p {config.top_p:g}{target}"
