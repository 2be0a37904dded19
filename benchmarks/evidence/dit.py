"""Phase "dit": a tiny Wan2.1 of random weights, trained with dense attention and the plain diffusion loss."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from sparge_core.distill import checkpoint
from sparge_core.distill.flow import DIFFUSION
from sparge_core.distill.log import JsonLines, read_records, write_curve
from sparge_core.distill.loop import AVERAGE, Distillation
from sparge_core.distill.options import ALL, FULL, options_from
from sparge_core.distill.pair import WanPair
from sparge_core.wan.transformer import DIFFUSERS

from . import latents
from .captions import TEXT_WIDTH
from .plan import Stage
from .run import DIT_FILE, Run

BASE = "evidence-wan"  # folder of the trained model in diffusers' format, and its name in students' files
DONE = "done.json"  # of a training run: its steps and seconds
EMBEDDING_STD = 0.02
TRAINING = {  # of every stage, beside what the plan says
    "student": FULL,
    "parameters": ALL,
    "loss": DIFFUSION,
    "top_k": 1.0,
    "top_p": 1.0,
    "checkpointing": False,
    "tensorboard": False,
    "warmup": 100,
    "ema": 0.998,
    "timestep_mean": 0.0,
    "timestep_std": 1.0,
    "shift": 3.0,  # with thousands of tokens a clip is still seen at noise that would hide a picture
    "held_out": 0,
    "save_every": 1000,
    "keep": 1,
}


def base_folder(run: Run) -> Path:
    return run.out / BASE


def train(run: Run) -> None:
    """All stages, each from the average of the one before; then the model in both schemes."""
    random = run.out / "dit-random"
    if not (random / "config.json").is_file():
        random_model(run).save_pretrained(random)
    base = random
    for number, stage in enumerate(run.plan.dit.stages):
        place = run.out / f"dit-{number}-{stage.name}"
        if not (place / DONE).is_file():
            _train_stage(run, stage, base, place)
        base = place / BASE
        if not (base / "config.json").is_file():
            model = random_model(run)
            model.load_state_dict(checkpoint.load_all(checkpoint.find(place), AVERAGE))
            model.save_pretrained(base)
    _export(run, base)


def random_model(run: Run) -> Any:
    """Diffusers' Wan at the plan's size: linear layers by Xavier and no output at first, as Wan starts."""
    from diffusers import WanTransformer3DModel

    plan = run.plan.dit
    torch.manual_seed(run.plan.seed)
    model = WanTransformer3DModel(
        num_attention_heads=plan.heads, ffn_dim=plan.ffn_dim, num_layers=plan.layers, text_dim=TEXT_WIDTH
    )
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            if "_embedder." in name:
                nn.init.normal_(module.weight, std=EMBEDDING_STD)
            else:
                nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)
    nn.init.zeros_(model.proj_out.weight)
    return model


def _train_stage(run: Run, stage: Stage, base: Path, out: Path) -> None:
    options = options_from(
        {
            **TRAINING,
            "base": base,
            "data": run.out,
            "out": out,
            "steps": stage.steps,
            "batch": stage.batch,
            "micro_batch": stage.batch,
            "learning_rate": stage.learning_rate,
            "dtype": run.dtype,
            "device": run.device.type,
            "compile": run.device.type == "cuda",  # small as the model is, launching kernels takes longest
            "seed": run.plan.seed,
        }
    )
    pair = WanPair(options, run.device)
    loop = Distillation(options, pair, latents.load(run, stage.name, latents.COPIES))
    with pair.attention.dense():
        follow(run, loop, stage.minutes)


def follow(run: Run, loop: Distillation, minutes: float = math.inf) -> list[dict[str, Any]]:
    """Make a run's steps until they are done or the minutes are over; goes on from its latest checkpoint.

    Returns its log. OutOfTime, with a checkpoint, when this process has no more time.
    """
    out, steps = loop.options.out, loop.options.steps
    out.mkdir(parents=True, exist_ok=True)
    if found := checkpoint.checkpoints(out):
        loop.resume(found[-1][1])
    lines = JsonLines(out, loop.step)
    spent = sum(record.get("seconds", 0.0) for record in read_records(out))
    for record in loop.records():
        lines.write(record)
        spent += record.get("seconds", 0.0)
        if record["step"] and record["step"] % 200 == 0:
            run.say(f"{out.name} step {record['step']} of {steps}: loss {record['loss']:.4f}, {spent:.0f} s")
        if loop.step and loop.step < steps and (spent > 60 * minutes or run.clock.over):
            loop.save()
            if spent > 60 * minutes:
                break
            run.clock.check()
    write_curve(out, out.name)
    log = read_records(out)
    facts = {"steps": loop.step, "wanted_steps": steps, "seconds": spent}
    run.write(str((out / DONE).relative_to(run.out)), facts)
    return log


def _export(run: Run, base: Path) -> None:
    """The model in diffusers' format, for students, and in ComfyUI's, both of the same numbers in fp16."""
    from diffusers import WanTransformer3DModel

    model: Any = WanTransformer3DModel.from_pretrained(base, local_files_only=True)
    model.half().save_pretrained(base_folder(run))
    weights = {}
    for key, weight in model.state_dict().items():
        name = DIFFUSERS.parse(key)
        assert name is not None, key
        weights[name.target] = weight.contiguous()
    save_file(weights, run.out / DIT_FILE, {"format": "pt"})
    stages = [run.read(f"dit-{i}-{stage.name}/{DONE}") for i, stage in enumerate(run.plan.dit.stages)]
    parameters = sum(weight.numel() for weight in weights.values())
    run.write("dit.json", {"parameters": parameters, "stages": stages})
