"""The node that makes training samples of a user's own results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import folder_paths
import torch
from comfy_api.latest import io, ui
from torch import Tensor

from ..sparge_core.distill import DistillError
from . import host

DEFAULT_FOLDER = "distillation/samples"
# What a Wan model's own code makes of a conditioning, to what a sample calls it.
TAKEN = {"c_crossattn": "text", "c_concat": "image_latent", "clip_fea": "image_embedding"}


class SpargeSaveSample(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SpargeSaveSample",
            display_name="Save Distillation Sample",
            category="model/training",
            description=(
                "Adds a finished video and the conditioning that it was made with to a folder of training "
                "samples. Samples made by the model itself need no data set."
            ),
            search_aliases=["sparse attention training data", "distillation data set"],
            is_output_node=True,
            inputs=[
                io.Model.Input("model", tooltip="The model that made the video."),
                io.Conditioning.Input("positive", tooltip="The positive conditioning that the sampler got."),
                io.Latent.Input(
                    "latent", tooltip="What the sampler returned; every video of a batch is a sample."
                ),
                io.String.Input(
                    "folder",
                    default=DEFAULT_FOLDER,
                    tooltip="Folder of samples inside ComfyUI's output folder; made where there is none.",
                ),
                io.String.Input(
                    "caption", default="", advanced=True, tooltip="Noted in the manifest, for you to read."
                ),
            ],
            outputs=[],
            hidden=[io.Hidden.prompt, io.Hidden.extra_pnginfo, io.Hidden.unique_id],
        )

    @classmethod
    def execute(
        cls,
        model: host.ModelPatcher,
        positive: list[Any],
        latent: dict[str, Any],
        folder: str,
        caption: str,
    ) -> io.NodeOutput:
        from ..sparge_core.distill.data import open_dataset, write_sample

        host.self_attention_layers(model)  # which names what is no Wan model
        path = output_folder(folder)
        for tensors in samples_of(model, positive, latent):
            write_sample(path, tensors, caption)
        text = f"{folder}: {len(open_dataset(path))} samples."
        return io.NodeOutput(ui=ui.PreviewText(text))


def output_folder(name: str) -> Path:
    """A folder of this name inside ComfyUI's output folder; DistillError for one that leads out of it."""
    output = Path(folder_paths.get_output_directory()).resolve()
    path = (output / name).resolve()
    if not name.strip() or output not in path.parents:
        raise DistillError(
            f'The folder "{name}" is not inside ComfyUI\'s output folder; give it a plain name.'
        )
    return path


def samples_of(
    model: host.ModelPatcher, positive: list[Any], latent: dict[str, Any]
) -> list[dict[str, Tensor]]:
    """Tensors of the samples, fp16, one of each video in `latent`; DistillError when they are none."""
    if len(positive) != 1:
        raise DistillError(
            f"The conditioning has {len(positive)} parts, and a sample has one; connect the output of one "
            "text encoder, or what an image-to-video node made of it."
        )
    if latent.get("noise_mask") is not None:
        raise DistillError("The latent has a mask; connect what the sampler returned for a video made anew.")
    text, options = positive[0]
    samples = latent["samples"]
    wan = model.model
    if samples.ndim != 5 or samples.shape[1] != wan.latent_format.latent_channels:
        raise DistillError(
            f"The latent is {tuple(samples.shape)}, and a video of this model has "
            f"{wan.latent_format.latent_channels} channels; connect what its sampler returned."
        )
    given = {name: value.clone() if isinstance(value, Tensor) else value for name, value in options.items()}
    one = torch.zeros_like(samples[:1])
    made = wan.extra_conds(**{**given, "cross_attn": text, "noise": one, "device": one.device})
    unknown = sorted(made.keys() - TAKEN.keys())
    if unknown or given.get("control") is not None:
        raise DistillError(
            f"The conditioning holds {', '.join(unknown) or 'a ControlNet'}, which a sample cannot; make "
            "samples with plain text-to-video or image-to-video."
        )
    condition = {TAKEN[name]: value.cond[0] for name, value in made.items()}
    clips = wan.process_latent_in(samples)
    return [{name: tensor.half() for name, tensor in {"latent": clip, **condition}.items()} for clip in clips]
