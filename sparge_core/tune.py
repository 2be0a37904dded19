"""Settings layer by layer for an error budget: `Calibration` measures a run, `Tuning` is what it chose.

The error of a layer is the relative L1 of its attention output against dense attention of the same inputs,
sum |sparse - dense| / sum |dense|, over all calls of a step. A layer gets the sparsest setting of `LADDER`
whose error stays within `HEADROOM` of the budget at the worst of the steps measured, or stays dense.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .attention import block_mask, sparse_attention
from .config import METHOD_VERSION, SparseConfig
from .geometry import BLOCK_K, BLOCK_Q
from .record import absolute_sums

# Target sparsities, sparsest first; top_k is the floor of each. In even steps of work where most is skipped,
# as the share kept is what the time goes by; below 0.2 sparse attention is no faster than dense.
SPARSITIES = (0.95, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
LADDER = tuple(SparseConfig(sparsity=sparsity) for sparsity in SPARSITIES)
# Part of the budget that a setting may use in the calibration: other seeds' errors are a few percent higher.
HEADROOM = 0.9

# What a file says of itself: which version of it, and for which method and block size it was measured.
HEADER = {
    "sparge_attention2_tuning": 1,
    "method_version": METHOD_VERSION,
    "block_q": BLOCK_Q,
    "block_k": BLOCK_K,
}
FIELDS = ("model", "budget", "start_percent", "end_percent", "steps", "tokens", "layers")  # beside it


class TuneError(ValueError):
    """A budget or a tuning that cannot be used; one message for the user."""


@dataclass(frozen=True)
class Identity:
    """What a tuning and a model have in common. type: the kind of Wan model, None where that is open."""

    type: str | None
    dim: int
    heads: int
    layers: int

    def __str__(self) -> str:
        kind = f"Wan {self.type}" if self.type else "Wan"
        return f"{kind} of width {self.dim}, {self.heads} heads and {self.layers} layers"


@dataclass(frozen=True)
class LayerTuning:
    """What was chosen for a layer.

    config: None for dense attention.
    error: of that setting at the worst step; of a dense layer, the least of any setting, or None where none
        was measured.
    skipped: share of the layer's token pairs that was skipped, 0 when dense.
    """

    config: SparseConfig | None
    error: float | None
    skipped: float


@dataclass(frozen=True)
class Tuning:
    """Settings of every layer of a model, by the layer's name.

    budget: the relative L1 asked for. window: start and end percent of the sampling that was measured.
    steps, tokens: how many steps were measured, and the length of the longest sequence.
    """

    model: Identity
    budget: float
    window: tuple[float, float]
    steps: int
    tokens: int
    layers: Mapping[str, LayerTuning]

    @property
    def skipped(self) -> float:
        """Share of the work of all layers that is skipped where attention is sparse."""
        return sum(layer.skipped for layer in self.layers.values()) / len(self.layers)

    def why_not(self, model: Identity, layers: Iterable[str]) -> str | None:
        """Why this is no tuning for such a model with these layers, or None."""
        if model != self.model:
            return f"the tuning is for {self.model}, and this model is {model}"
        if other := set(layers) ^ self.layers.keys():
            return f"the tuning and the model differ in the layers {name_layers(sorted(other))}"
        return None

    def describe(self) -> str:
        """What was chosen and what it saves, in a user's words, one line a fact."""
        budget = f"budget of {percent(self.budget)}"
        sparse = {name: layer.error or 0.0 for name, layer in self.layers.items() if layer.config}
        failed = {
            name: layer.error
            for name, layer in self.layers.items()
            if layer.config is None and layer.error is not None
        }
        unmeasured = [name for name in self.layers if name not in sparse and name not in failed]
        lines = []
        if sparse:
            lines.append(
                f"Skips {self.skipped:.1%} of the attention at the steps that run sparse, with an error of "
                f"at most {percent(max(sparse.values()))} in a layer, within the {budget}."
            )
        elif failed:
            lines.append(
                f"No setting keeps any layer within the {budget}, so all layers stay dense and nothing is "
                f"skipped; a budget above {percent(min(failed.values()) / HEADROOM)} would do."
            )
        else:
            lines.append("No layer was measured, so all layers stay dense and nothing is skipped.")
        lines += [f"  {setting}: {names}" for setting, names in self._groups() if setting != "dense"]
        if failed and sparse:
            least = min(failed, key=lambda name: failed[name])
            lines.append(
                f"  dense, because no setting keeps them within the budget: {name_layers(failed)} "
                f"(the least error was {percent(failed[least])}, of {least})"
            )
        if unmeasured:
            lines.append(f"  dense, because they were not measured: {name_layers(unmeasured)}")
        lines.append(
            f"The error is the relative L1 of a layer's attention, at the worst of {self.steps} steps with "
            f"{self.tokens} tokens; {1.0 - HEADROOM:.0%} of the budget is kept for other seeds. For "
            f"{self.model}."
        )
        return "\n".join(lines)

    def summary(self) -> str:
        """The settings in one line."""
        return "; ".join(f"{setting} in {names}" for setting, names in self._groups())

    def _groups(self) -> list[tuple[str, str]]:
        """Settings, sparsest first and dense last, each with its layers."""
        groups: dict[tuple[float, str], list[str]] = {}
        for name, layer in self.layers.items():
            config = layer.config
            key = (0.0, "dense")
            if config is not None:
                key = (config.sparsity, f"top_k {config.top_k:g}, sparsity {config.sparsity:g}")
            groups.setdefault(key, []).append(name)
        return [(setting, name_layers(names)) for (_, setting), names in sorted(groups.items(), reverse=True)]

    def save(self, path: Path) -> None:
        """Write the file whole or not at all; its folder is made where there is none."""
        content = {
            **HEADER,
            "model": asdict(self.model),
            "budget": self.budget,
            "start_percent": self.window[0],
            "end_percent": self.window[1],
            "steps": self.steps,
            "tokens": self.tokens,
            "layers": {name: _layer_to_json(layer) for name, layer in self.layers.items()},
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f"{path.name}.{os.getpid()}.part")
        try:
            unfinished.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)


class Calibration:
    """Errors of every setting of `LADDER`, of a run of a model with these attention `layers` (names).

    They are summed up on the device, in a place for each layer and step, and fetched by `finish`.
    """

    def __init__(self, layers: Sequence[str], steps: int) -> None:
        self.layers = tuple(layers)
        self.tokens = 0
        self._rows = {name: row for row, name in enumerate(self.layers)}
        shape = (len(self.layers), steps)
        # Of the outputs: sum |dense| and, for each setting, sum |sparse - dense| and token pairs skipped.
        self._shape = (*shape, 1 + 2 * len(LADDER))
        self._on: dict[torch.device, Tensor] = {}
        self._sums = np.zeros(self._shape)
        self._pairs = np.zeros(shape)  # token pairs of the calls

    def prepare(self, device: torch.device) -> None:
        """Allocate what recording on `device` needs, so that no call has to."""
        self._on[device] = torch.zeros(self._shape, device=device)

    @torch.no_grad()
    def record(
        self,
        layer: str,
        step: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dense: Tensor,
        *,
        scale: float | None = None,
        backend: str = "auto",
        pack: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """One attention call, q, k and v (B, H, L, D), computed with every setting; waits for no device.

        dense: its dense output, (B, H, L, D) or what `pack` makes of that. scale, backend: as in
        `sparse_attention`. One output of the call is held beside `dense` at a time.
        """
        if q.device not in self._on:
            self.prepare(q.device)
        cell = (self._rows[layer], step)
        sums = self._on[q.device][cell]
        pairs = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]
        for place, config in enumerate(LADDER):
            mask = block_mask(q, k, config, scale=scale)
            out = sparse_attention(q, k, v, config, scale=scale, backend=backend, mask=mask)
            error, size = absolute_sums(out if pack is None else pack(out), dense)
            sums[1 + 2 * place] += error
            sums[2 + 2 * place] += mask.sparsity * pairs
        sums[0] += size
        self._pairs[cell] += pairs
        self.tokens = max(self.tokens, q.shape[2])

    def finish(self) -> None:
        """Fetch the sums and give back what was allocated."""
        for sums in self._on.values():
            self._sums += sums.double().cpu().numpy()
        self._on.clear()

    def errors(self) -> np.ndarray:
        """(layers, steps, settings): relative L1, NaN where nothing was measured; after `finish`."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return self._sums[:, :, 1::2] / self._sums[:, :, :1]

    def tune(self, budget: float, model: Identity, window: tuple[float, float] = (0.0, 1.0)) -> Tuning:
        """The sparsest settings within `budget`, a relative L1 above 0; after `finish`.

        model: what was measured. window: start and end percent of the sampling that was.
        TuneError for a budget that is none.
        """
        check_budget(budget)
        measured = self._pairs > 0
        errors = self.errors()
        layers: dict[str, LayerTuning] = {}
        for row, name in enumerate(self.layers):
            steps = measured[row]
            if not steps.any():
                layers[name] = LayerTuning(None, None, 0.0)
                continue
            worst = errors[row, steps].max(0)  # NaN if one is, which is within no budget
            skipped = self._sums[row, :, 2::2].sum(0) / self._pairs[row].sum()
            within = np.flatnonzero(worst <= HEADROOM * budget)
            if within.size:
                chosen = int(within[0])
                layers[name] = LayerTuning(LADDER[chosen], float(worst[chosen]), float(skipped[chosen]))
            else:
                finite = worst[np.isfinite(worst)]
                layers[name] = LayerTuning(None, float(finite.min()) if finite.size else None, 0.0)
        return Tuning(model, float(budget), window, int(measured.any(0).sum()), self.tokens, layers)


def check_budget(budget: object) -> None:
    """TuneError, with what to give instead, for a budget that is no number above 0."""
    if not _is_number(budget) or not 0.0 < budget < math.inf:  # type: ignore[operator]
        raise TuneError(
            f"The budget is {budget}; it must be a number above 0, such as 0.05 for a relative L1 of 5 %."
        )


# ------------------------------------------------------------------------------------------------------------
# The file


def load_tuning(path: Path | str) -> Tuning:
    """The tuning that `Tuning.save` wrote. TuneError for any other file, and for one that cannot be read."""
    path = Path(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
        return _read(content)
    except OSError as error:
        raise TuneError(
            f"{path.name} cannot be read ({error.strerror}). Choose another file, or make it anew with Tune "
            "Sparse Attention."
        ) from None
    except (ValueError, OverflowError, RecursionError) as error:  # json's and the decoder's are ValueErrors
        what = (
            str(error) if isinstance(error, TuneError) else f"it is no JSON ({error or 'nested too deeply'})"
        )
        raise TuneError(
            f"{path.name} is no tuning that can be used: {what.rstrip('.')}. Make it anew with Tune Sparse "
            "Attention."
        ) from None


def _refuse_constant(name: str) -> float:
    raise TuneError(f"it holds {name}, which is no number")


def _read(content: Any) -> Tuning:
    if not isinstance(content, dict) or "sparge_attention2_tuning" not in content:
        raise TuneError("it lacks the key sparge_attention2_tuning")
    for key, value in HEADER.items():
        if content.get(key) != value:
            raise TuneError(f"its {key} is {content.get(key)!r}, and this version works with {value!r}")
    _check_keys("the file", content, (*HEADER, *FIELDS))
    about = content["model"]
    _check_keys("model", about, ("type", "dim", "heads", "layers"))
    if about["type"] is not None and not isinstance(about["type"], str):
        raise TuneError(f"model.type is {about['type']!r}, and it must be a name or null")
    model = Identity(
        about["type"], *(_count(f"model.{key}", about[key]) for key in ("dim", "heads", "layers"))
    )
    check_budget(content["budget"])
    window = _share("start_percent", content["start_percent"]), _share("end_percent", content["end_percent"])
    if window[0] > window[1]:
        raise TuneError(f"its start_percent {window[0]} is greater than its end_percent {window[1]}")
    layers = content["layers"]
    if not isinstance(layers, dict) or not layers:
        raise TuneError("it has no layers")
    return Tuning(
        model,
        float(content["budget"]),
        window,
        _count("steps", content["steps"], 0),
        _count("tokens", content["tokens"], 0),
        {name: _read_layer(f"layers.{name}", layer, content["budget"]) for name, layer in layers.items()},
    )


def _layer_to_json(layer: LayerTuning) -> dict[str, Any]:
    config = layer.config
    setting = "dense" if config is None else {"top_k": config.top_k, "sparsity": config.sparsity}
    return {"setting": setting, "error": layer.error, "skipped": layer.skipped}


def _read_layer(name: str, layer: Any, budget: float) -> LayerTuning:
    _check_keys(name, layer, ("setting", "error", "skipped"))
    setting, error = layer["setting"], layer["error"]
    if error is not None and (not _is_number(error) or not 0.0 <= error < math.inf):
        raise TuneError(f"{name}.error is {error!r}, and it must be a number of 0 or more, or null")
    skipped = _share(f"{name}.skipped", layer["skipped"])
    if setting == "dense":
        return LayerTuning(None, None if error is None else float(error), skipped)
    _check_keys(f"{name}.setting", setting, ("top_k", "sparsity"))
    top_k, sparsity = (_share(f"{name}.setting.{key}", setting[key]) for key in ("top_k", "sparsity"))
    if not 0.0 < sparsity < 1.0:
        raise TuneError(f"{name}.setting.sparsity is {sparsity}, and it must lie between 0 and 1")
    if error is None or error > budget:
        raise TuneError(f"{name} is sparse with an error of {error}, beyond the budget of {budget}")
    return LayerTuning(SparseConfig(top_k=top_k, sparsity=sparsity), float(error), skipped)


def _check_keys(name: str, content: Any, keys: Iterable[str]) -> None:
    if not isinstance(content, dict):
        raise TuneError(f"{name} is {content!r}, and it must hold {', '.join(keys)}")
    wrong = sorted({*keys} ^ content.keys())
    if wrong:
        what = "lacks" if wrong[0] in keys else "has an unknown key"
        raise TuneError(f"{name} {what} {wrong[0]}")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _share(name: str, value: Any) -> float:
    if not _is_number(value) or not 0.0 <= value <= 1.0:
        raise TuneError(f"{name} is {value!r}, and it must be a number from 0 to 1")
    return float(value)


def _count(name: str, value: Any, least: int = 1) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise TuneError(f"{name} is {value!r}, and it must be a whole number of {least} or more")
    return value


# ------------------------------------------------------------------------------------------------------------
# Words


def percent(share: float) -> str:
    """With two digits that count: 5.0%, 0.12%."""
    digits = max(0, 1 - math.floor(math.log10(share * 100))) if share > 0.0 else 0
    return f"{share:.{min(digits, 9)}%}"


def name_layers(names: Iterable[str]) -> str:
    """Names such as "blocks.0" by ranges of their numbers: "blocks 0-3, 7; vace_blocks 0"."""
    numbers: dict[str, list[int]] = {}
    for name in names:
        match = re.fullmatch(r"(.+)\.(\d+)", name)
        group = numbers.setdefault(match[1] if match else name, [])
        if match:
            group.append(int(match[2]))
    return "; ".join(f"{group} {_ranges(sorted(found))}".strip() for group, found in numbers.items())


def _ranges(numbers: list[int]) -> str:
    ranges: list[tuple[int, int]] = []
    for number in numbers:
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1] = (ranges[-1][0], number)
        else:
            ranges.append((number, number))
    return ", ".join(f"{first}-{last}" if first < last else f"{first}" for first, last in ranges)
