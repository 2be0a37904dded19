"""The evidence samples as ComfyUI does, so that what it measures is what its model makes here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.evidence import dit, plan, sampling, students
from benchmarks.evidence.captions import CaptionEmbedding
from benchmarks.evidence.latents import Clips
from benchmarks.evidence.run import Run
from make_workflows import TRAINED_CFG, TRAINED_FRAMES, TRAINED_SHIFT, TRAINED_SIZE, TRAINED_SPARSITY
from sparge_core.distill.data import Entry
from sparge_core.wan.transformer import DIFFUSERS
from tiny_models import CAPTION

PLAN = plan.load()


def test_the_demo_asks_for_what_the_model_was_trained_for() -> None:
    frames, height, width = PLAN.short.video
    assert (frames, (width, height)) == (TRAINED_FRAMES, TRAINED_SIZE)
    assert (PLAN.sampling.shift, PLAN.sampling.guidance) == (TRAINED_SHIFT, TRAINED_CFG)
    (union,) = (arm for arm in PLAN.arms if arm.name == students.SHIPPED)
    config = union.config(max(PLAN.sparsities))
    assert {"top_k": config.top_k, "sparsity": config.sparsity} == pytest.approx(TRAINED_SPARSITY)
    assert CaptionEmbedding(torch.device("cpu"))(CAPTION).shape == (512, 4096)


@pytest.mark.slow
def test_one_noise_gives_one_video_there_and_in_comfyui(
    comfy: ModuleType, rooms: SimpleNamespace, patch: Callable[..., Any], tmp_path: Path
) -> None:
    pytest.importorskip("diffusers", reason="needs the extra `distill`: pip install -e .[distill]")
    import comfy.sample
    import comfy.sd
    from comfy_extras.nodes_model_advanced import ModelSamplingSD3

    grid, steps = plan.Grid(4, 8, 8), 4
    run = Run(plan.load(smoke=True), tmp_path, torch.device("cpu"), plan.Clock())
    random = dit.random_model(run)
    torch.nn.init.normal_(random.proj_out.weight, std=0.1)
    random.save_pretrained(dit.base_folder(run))
    weights = {DIFFUSERS.parse(key).target: weight for key, weight in random.state_dict().items()}
    model = comfy.sd.load_diffusion_model_state_dict(weights, {"dtype": torch.float32})
    (model,) = ModelSamplingSD3().patch(model, TRAINED_SHIFT)

    latent = torch.zeros(1, *grid.latent)
    noise = comfy.sample.prepare_noise(latent, 3)
    embed = CaptionEmbedding(run.device)
    entry = Entry("clip", 0, "clip", {}, CAPTION)
    clips = Clips(tmp_path, (entry,), latent, (0,), embed.places([CAPTION, ""]), embed)
    told = embed(CAPTION)[None]
    arms = students.Students(run)
    case = next(students.cases(run))
    arms.become(case, trained=False)
    config = case.arm.config(case.sparsity)
    sparse = patch(model, top_k=config.top_k, top_p=config.top_p, sparsity=config.sparsity)
    wanted = plan.SamplingPlan(steps, TRAINED_CFG, TRAINED_SHIFT, 1)
    found = []
    for velocity, ours in ((arms.pair.teacher, model), (arms.pair.student, sparse)):
        there = sampling.sample(velocity, noise, clips, wanted)
        here = comfy.sample.sample(
            ours, noise, steps, TRAINED_CFG, "euler", "simple",
            [[told, {}]], [[torch.zeros_like(told), {}]], latent, disable_pbar=True, seed=3,
        )  # fmt: skip
        found.append(ours.model.process_latent_in(here))
        assert (found[-1] - noise).abs().mean() > 0.1
        torch.testing.assert_close(found[-1], there, atol=2e-4, rtol=2e-4)
    assert (found[0] - found[1]).abs().max() > 1e-3
