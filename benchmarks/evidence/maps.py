"""Phase "seeds", second part: what each rule keeps of the models' own attention, tables (a), (b) and (d)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparge_core import BLOCK_K, BLOCK_Q, SparseConfig, block_mask, sparse_attention
from sparge_core.distill.flow import HELD_OUT as HELD_OUT_NOISE
from sparge_core.distill.flow import noise_like, noised
from sparge_core.distill.pair import Batch
from sparge_core.reference import block_means

from . import latents
from .latents import Clips
from .plan import RASTER, TILES
from .run import HELD_OUT, Run
from .students import Attend, Case, Students, cases, tiled, to_tiles

TIMES = (0.3, 0.6, 0.9)  # of the noised clip that is looked at
MASS = 0.6  # the paper's, for the sparsity before and after distillation
AT_MASS = SparseConfig(top_k=0.0, top_p=MASS)
RULES = {"Top-k": "top-k only", "Top-p": "top-p only", "union": "union"}  # and the arms that follow them
UNIFORM, SKEWED, ALL = "uniform", "skewed", "all"

Heads = tuple[Tensor, Tensor, Tensor]  # q, k, v (1, H, L, D) of a layer


class Sums:
    """Sums of a difference and of what it is relative to, by name."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = defaultdict(lambda: torch.zeros(2, dtype=torch.float64))

    def add(self, name: str, value: Tensor, whole: Tensor | float = 1.0) -> None:
        self._sums[name] += torch.stack((value.double().cpu(), torch.as_tensor(whole).double().cpu()))

    def ratios(self) -> dict[str, float]:
        return {name: float(value / whole) for name, (value, whole) in self._sums.items()}


def run_all(run: Run) -> None:
    """maps-SEED.json: the tables of one seed's held-out clip and students."""
    todo = [seed for seed in run.seeds if not run.has(f"maps-{seed}.json")]
    if not todo:
        return
    students = Students(run)
    for seed in todo:
        run.clock.check()
        clips = latents.load(run, HELD_OUT).subset(run.plan.held_out(seed))
        run.write(f"maps-{seed}.json", _one_seed(run, students, clips, seed))
        run.say(f"maps of seed {seed} done")


def _one_seed(run: Run, students: Students, clips: Clips, seed: int) -> dict[str, Any]:
    by_arm = {(case.arm.name, case.sparsity): case for case in cases(run) if case.seed == seed}
    rules, orders = Sums(), Sums()
    union = by_arm["union", max(run.plan.sparsities)]
    for heads in _attention(run, students, clips, seed, union, trained=False):
        dense = F.scaled_dot_product_attention(*heads)
        rows = _kinds_of_rows(*heads[:2])
        for sparsity in run.plan.sparsities:
            for rule, arm in RULES.items():
                config = by_arm[arm, sparsity].arm.config(sparsity)
                _compare(rules, f"{rule} {sparsity:g}", heads, dense, config, rows)
                rules.add(f"{rule} {sparsity:g} sparsity", block_mask(*heads[:2], config).sparsity)
            for order, attend in ((RASTER, sparse_attention), (TILES, tiled(run.plan.long))):
                error, size = _errors(attend(*heads, union.arm.config(sparsity)), dense)
                orders.add(f"{order} {sparsity:g}", error.sum(), size.sum())
        q, k, _ = heads
        in_tiles = (to_tiles(q, run.plan.long), to_tiles(k, run.plan.long))
        for order, pair in ((RASTER, (q, k)), (TILES, in_tiles)):
            orders.add(f"{order} sparsity at {MASS:g} mass", block_mask(*pair, AT_MASS).sparsity)
    models = {"before": (union, False), "after": (union, True)}
    models["after, diffusion loss"] = (by_arm["union, diffusion loss", union.sparsity], True)
    distillation: dict[str, dict[str, float]] = {}
    for model, (case, trained) in models.items():
        sums = Sums()
        for heads in _attention(run, students, clips, seed, case, trained=trained):
            dense = F.scaled_dot_product_attention(*heads)
            sums.add(f"sparsity at {MASS:g} mass", block_mask(*heads[:2], AT_MASS).sparsity)
            own = case.arm.config(case.sparsity)
            for name, config in ((f"L1 at {MASS:g} mass", AT_MASS), (f"L1 at {case.sparsity:g}", own)):
                error, size = _errors(sparse_attention(*heads, config), dense)
                sums.add(name, error.sum(), size.sum())
        distillation[model] = sums.ratios()
    return {"rules": rules.ratios(), "distillation": distillation, "orders": orders.ratios()}


def _attention(
    run: Run, students: Students, clips: Clips, seed: int, case: Case, *, trained: bool
) -> Iterator[Heads]:
    """q, k and v of every layer, at each of TIMES, of a seed's first held-out clip.

    Of the base they are those of dense attention, and of a student those of its own sparse attention.
    """
    students.become(case, trained=trained)
    attention = students.pair.attention
    inner: Attend = attention.attend if trained else _dense
    seen: list[Heads] = []

    def record(q: Tensor, k: Tensor, v: Tensor, config: SparseConfig) -> Tensor:
        seen.append((q, k, v))
        return inner(q, k, v, config)

    one = clips.read(0)
    batch = Batch([one], run.device)
    noise = noise_like(one.latent, seed, 0, HELD_OUT_NOISE)[None].to(run.device)
    for t in torch.tensor(TIMES, device=run.device).split(1):
        seen.clear()
        attention.attend = record
        with torch.no_grad():
            students.pair.student(noised(batch.latent, noise, t), t, batch)
        yield from seen


def _dense(q: Tensor, k: Tensor, v: Tensor, config: SparseConfig) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def _kinds_of_rows(q: Tensor, k: Tensor) -> dict[str, Tensor]:
    """Query blocks (H, n_q) by how their pooled probability is spread: bool masks.

    Uniform: the quarter that needs the most blocks for 60 % of it. Skewed: the quarter that needs the fewest.
    """
    scores = block_means(q, BLOCK_Q) @ block_means(k, BLOCK_K).transpose(-1, -2) * q.shape[-1] ** -0.5
    ranked = scores.softmax(-1).sort(dim=-1, descending=True).values
    # The share of the last block is left to decide among rows that need as many.
    needed = (ranked.cumsum(-1) < MASS).sum(-1)[0].float() - ranked[0, ..., 0]
    low, high = needed.quantile(0.25), needed.quantile(0.75)
    return {UNIFORM: needed >= high, SKEWED: needed <= low, ALL: torch.ones_like(needed, dtype=torch.bool)}


def _compare(
    sums: Sums, name: str, heads: Heads, dense: Tensor, config: SparseConfig, rows: dict[str, Tensor]
) -> None:
    error, size = _errors(sparse_attention(*heads, config), dense)
    for kind, chosen in rows.items():
        sums.add(f"{name} {kind}", error[chosen].sum(), size[chosen].sum())


def _errors(out: Tensor, dense: Tensor) -> tuple[Tensor, Tensor]:
    """Sums (H, n_q) of |out - dense| and of |dense| over each query block."""

    def blocks(x: Tensor) -> Tensor:
        of_tokens = x.float().abs().sum(-1)[0]  # (H, L)
        return F.pad(of_tokens, (0, -of_tokens.shape[-1] % BLOCK_Q)).unflatten(-1, (-1, BLOCK_Q)).sum(-1)

    return blocks(out.float() - dense.float()), blocks(dense)
