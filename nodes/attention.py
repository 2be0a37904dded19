"""What a patched model does at each self-attention call, and what is remembered of it. Knows no ComfyUI."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..sparge_core import DensePolicy, SparseConfig, block_mask, choose, sparse_attention
from ..sparge_core.record import Grid, RunStatistics, Timer
from ..sparge_core.reference import kept_mass
from ..sparge_core.report import describe, status
from ..sparge_core.tune import Calibration, Tuning, percent

log = logging.getLogger(__name__)

# Training-free setting: half of the block pairs, and the first steps dense, because they lay out the picture.
TRAINING_FREE = SparseConfig(top_k=0.03, top_p=0.2, sparsity=0.5)
TRAINING_FREE_START = 0.2
# Beyond this sparsity the picture of a model that was not fine-tuned for it falls apart.
TRAINING_FREE_LIMIT = 0.8

# Query blocks over which the kept mass of a call is measured: enough to know it, and little memory.
MASS_ROWS = 32

CALIBRATED = "calibration"  # reason of the dense calls that settings are measured for

# Several samplers of a graph may use one patched model before the first report is made.
RUNS_KEPT = 8


@dataclass(frozen=True)
class Settings:
    """What was asked for.

    config: of every layer, None where `tuning` has one for each. source: where they come from, in a user's
    words. student: whether the weights are a student's. notes: what to tell with every run.
    """

    config: SparseConfig | None
    policy: DensePolicy
    backend: str
    source: str
    student: bool
    tuning: Tuning | None = None
    notes: tuple[str, ...] = ()

    def config_of(self, layer: Layer) -> SparseConfig | None:
        """The layer's, None for one that stays dense in the tuning."""
        return self.config if self.tuning is None else self.tuning.layers[layer.name].config

    @property
    def may_use_cuda(self) -> bool:
        """Whether our kernels may run what stays dense, too: another back end was not asked for."""
        return self.backend in ("auto", "cuda")

    def describe(self) -> str:
        config, policy = self.config, self.policy
        if self.tuning is not None:
            rule = self.tuning.summary()
        elif config is not None:
            other = f"sparsity {config.sparsity:g}" if config.sparsity else f"top_p {config.top_p:g}"
            rule = f"top_k {config.top_k:g}, {other}"
        layers = ", ".join(map(str, policy.dense_layers)) or "none"
        return (
            f"Settings ({self.source}): {rule}, from {policy.start_percent:.0%} "
            f"to {policy.end_percent:.0%} of the sampling, dense layers: {layers}, "
            f"from {policy.min_tokens} tokens, back end {self.backend}."
        )


def choose_settings(
    mode: str,
    manual: SparseConfig,
    policy: DensePolicy,
    backend: str,
    student: SparseConfig | None,
    student_file: str | None = None,
    tuning: Tuning | None = None,
) -> Settings:
    """Settings for mode "auto" or "manual".

    student: those that the model was fine-tuned with, if it carries any. student_file: where its weights are
    from, if they are a student's; a file may carry no settings. tuning: one for this model, which "auto"
    prefers to anything else.
    """
    is_student = student is not None or student_file is not None
    if mode == "manual":
        unused = "a tuning is connected, but on manual the sliders count; set settings to auto to use it"
        if student is not None and manual != student:
            log.warning(
                "SpargeAttention2: this model was fine-tuned with top_k %g, top_p %g, sparsity %g, but the "
                "settings are manual and differ; set them to auto to use the model's own.",
                student.top_k,
                student.top_p,
                student.sparsity,
            )
        notes = () if tuning is None else (unused,)
        return Settings(manual, policy, backend, "manual", is_student, notes=notes)
    if tuning is not None:
        start = min(max(policy.start_percent, tuning.window[0]), policy.end_percent)
        end = max(min(policy.end_percent, tuning.window[1]), start)
        policy = replace(policy, start_percent=start, end_percent=end)  # where the errors were measured
        source = f"auto: tuned for a budget of {percent(tuning.budget)}"
        instead = "the tuning is used, and not the settings that the student was fine-tuned with"
        notes = () if student is None else (instead,)
        return Settings(None, policy, backend, source, is_student, tuning, notes=notes)
    if student is not None:
        return Settings(student, policy, backend, "auto: the student's own", True)
    if student_file is not None:
        log.warning(
            "SpargeAttention2: the student %s carries no settings, so auto falls back to those for models "
            "that are none; set settings to manual and the sliders to what its authors name.",
            student_file,
        )
    start = min(max(policy.start_percent, TRAINING_FREE_START), policy.end_percent)
    return Settings(
        TRAINING_FREE, replace(policy, start_percent=start), backend, "auto: training-free", False
    )


@dataclass(frozen=True)
class Layer:
    """A self-attention of the model. name: as the model calls it; block: its number for `dense_layers`."""

    name: str
    block: int


@dataclass(frozen=True)
class Call:
    """One attention call of the host.

    q, k, v: (B, H, L, D), or as the host gave them if `reason` says why they cannot be sparse.
    dense: the host's own attention for this call, in its layout. pack: (B, H, L, D) into that layout.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float | None
    reason: str | None
    dense: Callable[[], Tensor]
    pack: Callable[[Tensor], Tensor]

    @property
    def size(self) -> tuple[int, ...] | None:
        """Batch, heads, query and key tokens, where they are known."""
        return None if self.reason is not None else (*self.q.shape[:3], self.k.shape[2])


class Run:
    """One sampling run: where it stands, and afterwards what it did.

    sigmas: the schedule, one noise level a step and the final one.
    window: highest and lowest sigma that run sparse.
    covered: layers on whose patch another node has put its own.
    device: where the model runs.
    probed: steps at which sparse attention is compared with dense.
    calibration: of a run that is dense to measure settings for a tuning, at the steps `measured`.
    student: whether the model's weights are a student's.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        sigmas: Sequence[float],
        window: tuple[float, float],
        covered: Sequence[Layer],
        device: torch.device,
        student: bool,
    ) -> None:
        self.idle = len(sigmas) < 2  # the rest of a schedule that was split at its end has no step
        self.steps = max(len(sigmas) - 1, 1)
        self.statistics = RunStatistics([layer.name for layer in layers], self.steps)
        self.statistics.prepare(device)
        self.summary: dict[str, Any] = {}
        self.notes: list[str] = []
        self.latent: Tensor | None = None  # by which host.find_run knows the result again
        self.options: dict[str, Any] = {}
        self.step = 0
        self.grid: Grid | None = None
        self.in_window = True
        self.probed: frozenset[int] = frozenset()
        self.calibration: Calibration | None = None
        self.measured: frozenset[int] = frozenset()
        self.student = student
        self.reached: set[Layer] = set()
        self.displaced: set[Layer] = set()
        self._sigmas = sigmas
        self._window = window
        self._covered = covered

    def begin_step(self, sigma: float, options: dict[str, Any], grid: Grid | None = None) -> None:
        """A call of the model at this noise level.

        options: the host's, for calls that come without them. grid: frames, rows and columns of the video's
        tokens, if they are known.
        """
        self.options, self.grid = options, grid
        self.in_window = self._within(sigma)
        self.step = min(range(self.steps), key=lambda step: abs(self._sigmas[step] - sigma))

    def _within(self, sigma: float) -> bool:
        highest, lowest = self._window
        # The schedule is float32 and percent_to_sigma is not: without rounding, a step that lies on the edge
        # of the window could fall on either side of it.
        return bool(np.float32(lowest) <= np.float32(sigma) <= np.float32(highest))

    def probe(self, count: int) -> None:
        """Compare sparse with dense attention at `count` of the steps within the window, evenly spread."""
        sparse = self._sparse_steps()
        if sparse:
            places = (int((number + 0.5) * len(sparse) / count) for number in range(count))
            self.probed = frozenset(sparse[place] for place in places)

    def calibrate(self, count: int, device: torch.device) -> None:
        """Run dense and measure settings at `count` steps of the window, evenly spread from first to last."""
        sparse = self._sparse_steps()
        places = np.linspace(0, len(sparse) - 1, min(count, len(sparse))).round().astype(int)
        self.measured = frozenset(sparse[place] for place in places)
        self.calibration = Calibration(self.statistics.layers, self.steps)
        self.calibration.prepare(device)

    def _sparse_steps(self) -> list[int]:
        return [step for step, sigma in enumerate(self._sigmas[: self.steps]) if self._within(sigma)]

    @property
    def status(self) -> str:
        """One line on the run so far."""
        return status(self.step + 1, self.steps, self.statistics.progress())

    def end_step(self) -> None:
        """From the first step on it is known which patches a later node has displaced rather than called."""
        self.statistics.send()
        displaced = [layer for layer in self._covered if layer not in self.reached]
        self._covered = ()
        self.displaced.update(displaced)
        if displaced:
            self.note(
                f"a later node replaced the attention of {len(displaced)} layers, {displaced[0].name} first, "
                "which therefore do not use SpargeAttention2; put the SpargeAttention2 node behind that one"
            )

    def note(self, line: str) -> None:
        self.notes.append(line)
        log.warning("SpargeAttention2: %s.", line)


class SparseAttention:
    """The attention of one patched model, shared by its clones; each of their sampling runs is a `Run`."""

    def __init__(self, settings: Settings, layers: Sequence[Layer]) -> None:
        self.settings = settings
        self.layers = layers
        self.runs: deque[Run] = deque(maxlen=RUNS_KEPT)  # finished ones, the latest last
        self.current: Run | None = None

    @contextmanager
    def run(
        self,
        sigmas: Sequence[float],
        window: tuple[float, float],
        covered: Sequence[Layer],
        device: torch.device,
        student: bool = False,
    ) -> Iterator[Run]:
        """One sampling run, kept in `runs` if it comes through; if it fails or is interrupted, forgotten."""
        student = student or self.settings.student
        run = Run(self.layers, sigmas, window, covered, device, student)
        outer, self.current = self.current, run
        try:
            yield run
        finally:
            self.current = outer
        for note in self.settings.notes:
            run.note(note)
        self._finish(run)

    def attend(self, layer: Layer, call: Call) -> Tensor:
        """The call's result: sparse, or the host's own with the reason counted."""
        run = self.current  # None where the model is used outside of a sampler
        backend, reason = self._choose(layer, call)  # compiles kernels at the first call, which is not timed
        config = self.settings.config_of(layer)
        calibration = None if run is None or reason is not None else run.calibration
        if calibration is not None:
            reason = CALIBRATED
        timer = None if run is None else Timer(call.q.device)
        if reason is None and config is not None:
            q, k, v = call.q, call.k, call.v
            mask = block_mask(q, k, config, scale=call.scale)
            out = call.pack(sparse_attention(q, k, v, config, scale=call.scale, backend=backend, mask=mask))
            if run is not None:
                statistics, at = run.statistics, (layer.name, run.step)
                statistics.record_sparse(*at, mask, config, timer, run.grid)
                if statistics.wants_mass(*at):
                    mass = kept_mass(q, k, mask, scale=call.scale, rows=MASS_ROWS)
                    statistics.record_mass(*at, mass)
                if run.step in run.probed:
                    timer = Timer(call.q.device)
                    dense = call.dense()
                    timer.stop()
                    statistics.record_error(*at, out, dense, timer, call.size)
        else:
            out = call.dense()
            if run is not None:
                reason = reason or "layer dense in the tuning"
                run.statistics.record_dense(layer.name, run.step, reason, timer, call.size)
        if run is not None:
            if calibration is not None and run.step in run.measured:
                calibration.record(
                    layer.name,
                    run.step,
                    *(call.q, call.k, call.v, out),
                    scale=call.scale,
                    backend=backend,
                    pack=call.pack,
                )
            run.reached.add(layer)
        return out

    def _choose(self, layer: Layer, call: Call) -> tuple[str, str | None]:
        """The back end for this call and None, or "dense" and why."""
        reason = call.reason
        if reason is None and self.current is not None and not self.current.in_window:
            reason = "step outside of start_percent to end_percent"
        if reason is None:
            reason = self.settings.policy.why_dense(layer=layer.block, tokens=call.q.shape[2])
        if reason is not None:
            return "dense", reason
        choice = choose(call.q, call.k, call.v, self.settings.backend)
        if choice.name == "dense":
            return "dense", choice.why or "back end set to dense"
        return choice.name, None

    def _finish(self, run: Run) -> None:
        run.summary = run.statistics.summary()
        run.statistics.release()
        if run.calibration is not None:
            run.calibration.finish()
        sparsity = run.summary["sparsity"]
        called = run.reached | run.displaced
        missed = [layer.name for layer in self.layers if layer not in called and not run.idle]
        if len(missed) == len(self.layers):
            run.note(
                "no attention call of this run came to SpargeAttention2, because another node replaced the "
                "model's blocks; bypass nodes behind the loader one by one to see which"
            )
        elif missed:
            run.note(
                f"the attention of {len(missed)} layers, {missed[0]} first, was never called, because "
                "another node skips or replaces them; if it replaces them, put the SpargeAttention2 node "
                "behind that one"
            )
        if run.student and sparsity is None and run.reached:
            reasons = run.summary["dense_calls"]
            run.note(
                "the weights are a student's, distilled for sparse attention, but every call was dense "
                f"({max(reasons, key=reasons.get)}), so the picture will suffer"
            )
        known = run.student or self.settings.tuning is not None
        if sparsity is not None and sparsity > TRAINING_FREE_LIMIT and not known:
            run.note(
                f"{sparsity:.0%} of the attention was skipped, but the model carries no settings of a "
                "distilled student; if the picture is noise, set sparsity to 0.5 and start_percent to 0.2, "
                "or load a student's weights"
            )
        log.info("SpargeAttention2: %s", " ".join(describe(run.summary).split()))
        self.runs.append(run)

    def account(self, run: Run) -> dict[str, Any]:
        """JSON-able account of a finished run: its summary, its settings and what there is to note."""
        settings = asdict(self.settings)
        return {**run.summary, "settings": settings, "notes": run.notes}
