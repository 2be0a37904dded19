"""Tiny Wan checkpoints, which ComfyUI's own loaders detect and run on a CPU.

    python scripts/host.py run scripts/tiny_models.py FOLDER

writes into the ComfyUI, or the base directory, in FOLDER

- the common kinds with random weights, with a VAE and a text embedding: the pictures are noise; the graph,
  the shapes and the attention are those of the real models;
- the trained model of benchmarks/evidence/trained/ with its VAE, its students and a caption's embedding;
  where it is not, random weights under its names."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from comfy_tree import use_comfy
from host import ROOT, HostError, ready_host

# Last, since the pack's `nodes` must not hide ComfyUI's.
sys.path.append(str(ROOT))

HEAD_DIM = 128  # of every Wan; ComfyUI derives the number of heads from it
TEXT_TOKENS, TEXT_DIM = 512, 4096  # of the umT5 encoder, fixed in the model code
LATENT_CHANNELS = 16
# Image-to-video gets the noisy latent, a mask of 4 channels and the latent of the given frames.
IMAGE_IN_CHANNELS = LATENT_CHANNELS + 4 + LATENT_CHANNELS
# VACE's control: inactive and reactive latents, and a mask of 8 × 8 pixels a latent cell.
VACE_IN_CHANNELS = 2 * LATENT_CHANNELS + 64
SHARD = "shard_0000.pkl"  # of a data set of ComfyUI's
VAE_WIDTH = 4  # 96 in the real one; decoding is most of the time of a tiny run
CHANNELS_5B = 48  # of the latents of Wan2.2's own VAE
CLIP_TOKENS = 257  # of one picture; first-last-frame models embed the positions of two

KINDS = ("t2v", "i2v", "flf2v", "vace")  # of which `make` writes files

# What `make evidence` leaves, to be copied here; and the folder of models/ that ComfyUI looks for each in.
TRAINED = ROOT / "benchmarks" / "evidence" / "trained"
TRAINED_DIT, TRAINED_VAE = "evidence_wan.safetensors", "evidence_vae.safetensors"
STUDENT, SHORT_STUDENT = "evidence_student.safetensors", "evidence_student_short.safetensors"
TRAINED_FILES = {
    TRAINED_DIT: "diffusion_models",
    TRAINED_VAE: "vae",
    STUDENT: "loras",
    SHORT_STUDENT: "loras",
}
CAPTION_DATASET = "evidence_caption"
CAPTION = "a large plain red disc moving right, a large striped yellow star bouncing, over smooth navy ground"

# Of every kind: ComfyUI's code, and what its arguments are beside the common ones.
WAN = "comfy.ldm.wan.model"
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "t2v": (f"{WAN}.WanModel", {"model_type": "t2v"}),
    "i2v": (f"{WAN}.WanModel", {"model_type": "i2v", "in_dim": IMAGE_IN_CHANNELS}),
    "flf2v": (
        f"{WAN}.WanModel",
        {"model_type": "i2v", "in_dim": IMAGE_IN_CHANNELS, "flf_pos_embed_token_number": 2 * CLIP_TOKENS},
    ),
    "vace": (f"{WAN}.VaceWanModel", {"vace_in_dim": VACE_IN_CHANNELS, "vace_layers": 1}),
    "reference": (f"{WAN}.WanModel", {"model_type": "t2v", "in_dim_ref_conv": LATENT_CHANNELS}),
    "control": (f"{WAN}.WanModel", {"model_type": "i2v", "in_dim": 3 * LATENT_CHANNELS}),
    "camera": (f"{WAN}.CameraWanModel", {"model_type": "camera", "in_dim": 2 * LATENT_CHANNELS}),
    "i2v_2.2": (f"{WAN}.WanModel", {"model_type": "t2v", "in_dim": IMAGE_IN_CHANNELS}),
    "control_2.2": (
        f"{WAN}.WanModel",
        {
            "model_type": "t2v",
            "in_dim": IMAGE_IN_CHANNELS + LATENT_CHANNELS,
            "in_dim_ref_conv": LATENT_CHANNELS,
        },
    ),
    "camera_2.2": (f"{WAN}.CameraWanModel", {"model_type": "camera_2.2", "in_dim": IMAGE_IN_CHANNELS}),
    "ti2v": (f"{WAN}.WanModel", {"model_type": "t2v", "in_dim": CHANNELS_5B, "out_dim": CHANNELS_5B}),
    "s2v": (f"{WAN}.WanModel_S2V", {}),
    "humo_1.7B": (f"{WAN}.HumoWanModel", {}),
    "humo_17B": (f"{WAN}.HumoWanModel", {"in_dim": IMAGE_IN_CHANNELS}),
    # of five layers at least: it has one face adapter for each five
    "animate": (
        "comfy.ldm.wan.model_animate.AnimateWanModel",
        {"in_dim": IMAGE_IN_CHANNELS, "num_layers": 5},
    ),
    "scail": (f"{WAN}.SCAILWanModel", {"in_dim": LATENT_CHANNELS + 4}),
    "scail2": (f"{WAN}.SCAIL2WanModel", {"in_dim": LATENT_CHANNELS + 4}),
    "wandancer": ("comfy.ldm.wan.model_wandancer.WanDancerModel", {"in_dim": IMAGE_IN_CHANNELS}),
}


def random_dit(kind: str, *, heads: int = 2, layers: int = 2, seed: int = 0) -> dict[str, Tensor]:
    """A diffusion transformer's weights in ComfyUI's key scheme, fp16; needs `use_comfy` before it."""
    model = empty_dit(kind, heads=heads, layers=layers)
    return {key: weight.half() for key, weight in _random_weights(model, seed).items()}


def empty_dit(kind: str, *, heads: int = 2, layers: int = 2, device: str = "cpu") -> nn.Module:
    """ComfyUI's diffusion transformer of a kind, fp32, with whatever is in memory as its weights."""
    import comfy.ops

    if kind not in ARCHITECTURES:
        raise ValueError(f"There is no tiny model {kind!r}; the kinds are {', '.join(ARCHITECTURES)}.")
    code, arguments = ARCHITECTURES[kind]
    module, name = code.rsplit(".", 1)
    dim = heads * HEAD_DIM
    common = {
        "in_dim": LATENT_CHANNELS,
        "out_dim": LATENT_CHANNELS,
        "dim": dim,
        "ffn_dim": 2 * dim,
        "num_heads": heads,
        "num_layers": layers,
        "text_dim": TEXT_DIM,
        "cross_attn_norm": True,
        "operations": comfy.ops.disable_weight_init,
        "dtype": torch.float32,
        "device": device,
    }
    model: nn.Module = getattr(importlib.import_module(module), name)(**common | arguments)
    return model


def random_vae(seed: int = 0) -> dict[str, Tensor]:
    """Weights of Wan's VAE at a width of VAE_WIDTH channels, fp32."""
    from comfy.ldm.wan.vae import WanVAE

    vae = WanVAE(
        dim=VAE_WIDTH,
        z_dim=LATENT_CHANNELS,
        dim_mult=[1, 2, 4, 4],
        num_res_blocks=2,
        attn_scales=[],
        temperal_downsample=[False, True, True],
        image_channels=3,
        conv_out_channels=3,
        dropout=0.0,
    )
    return _random_weights(vae, seed)


def _random_weights(model: nn.Module, seed: int) -> dict[str, Tensor]:
    """Weights that keep activations near unit variance: norms 1, biases 0, matrices by their fan-in."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for key, like in model.state_dict().items():
        if key.endswith("modulation"):
            weight = torch.randn(like.shape, generator=generator) / like.shape[-1] ** 0.5
        elif like.ndim > 1 and not key.endswith("gamma"):
            weight = torch.randn(like.shape, generator=generator) / like[0].numel() ** 0.5
        elif key.endswith(("gamma", "weight")):
            weight = torch.ones(like.shape)
        else:
            weight = torch.zeros(like.shape)
        weights[key] = weight
    return weights


def text_embedding(seed: int = 0) -> Tensor:
    """A stand-in for what umT5 makes of a prompt: (1, 512, 4096), fp32."""
    return torch.randn(1, TEXT_TOKENS, TEXT_DIM, generator=torch.Generator().manual_seed(seed))


def random_student(base: dict[str, Tensor], seed: int = 0) -> dict[str, Tensor]:
    """A diff of the self-attention's matrices, under the names that `sparge-distill` gives them, fp16."""
    generator = torch.Generator().manual_seed(seed)
    return {
        f"diffusion_model.{key.removesuffix('.weight')}.diff": weight.std()
        * torch.randn(weight.shape, generator=generator).half()
        / 8
        for key, weight in base.items()
        if ".self_attn." in key and weight.ndim == 2
    }


def files_in(base: Path) -> dict[str, Path]:
    """Where `make` puts each file under ComfyUI's base directory: DiTs by kind, "vae", "text" (embedding)."""
    files = {kind: base / "models" / "diffusion_models" / f"tiny_wan21_{kind}.safetensors" for kind in KINDS}
    files["vae"] = base / "models" / "vae" / "tiny_wan21_vae.safetensors"
    files["text"] = base / "datasets" / "tiny_wan21" / SHARD
    return files


def make(base: Path) -> dict[str, Path]:
    """Write the files and return `files_in(base)`; files newer than this script are kept."""
    files = files_in(base)
    written_after = Path(__file__).stat().st_mtime
    missing = [
        kind for kind, file in files.items() if not file.is_file() or file.stat().st_mtime < written_after
    ]
    if not missing:
        return files
    _use_host()
    for kind in missing:
        if kind == "text":
            _write_dataset(files[kind].parent, text_embedding())
        else:
            _write_weights(files[kind], random_vae() if kind == "vae" else random_dit(kind))
    return files


def make_trained(base: Path, caption: str = CAPTION, trained: Path = TRAINED) -> bool:
    """Put the files in `trained`, and the caption's embedding, where ComfyUI finds them.

    False where they are not all there: random weights have their names then. ValueError for a caption with
    words that the model was never told.
    """
    if not trained.parent.is_dir():
        raise HostError("A release has no benchmarks/, which this needs: take a git clone of the pack.")
    from benchmarks.evidence.captions import CaptionEmbedding

    embedding = CaptionEmbedding(torch.device("cpu"))(caption)
    _write_dataset(base / "datasets" / CAPTION_DATASET, embedding[None])
    places = {name: base / "models" / folder / name for name, folder in TRAINED_FILES.items()}
    if all((trained / name).is_file() for name in TRAINED_FILES):
        for name, place in places.items():
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(trained / name, place)
        return True
    from sparge_core import SparseConfig

    _use_host()
    weights = random_dit("t2v")
    _write_weights(places[TRAINED_DIT], weights)
    _write_weights(places[TRAINED_VAE], random_vae())
    settings = SparseConfig(top_k=0.03, sparsity=0.95).to_metadata()
    for name in (STUDENT, SHORT_STUDENT):
        _write_weights(places[name], random_student(weights), settings)
    return False


def _use_host() -> None:
    host = ready_host()
    if host is None:
        raise HostError("There is no ComfyUI yet. Run: python scripts/host.py setup")
    use_comfy(host.tree)


def _write_weights(file: Path, weights: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    from safetensors.torch import save_file

    file.parent.mkdir(parents=True, exist_ok=True)
    save_file({key: weight.contiguous() for key, weight in weights.items()}, file, metadata)


def _write_dataset(folder: Path, embedding: Tensor) -> None:
    """A text embedding in the format of ComfyUI's node LoadTrainingDataset, which finds a data set by its
    metadata.json and reads the shard with weights_only."""
    folder.mkdir(parents=True, exist_ok=True)
    metadata = {"num_samples": 1, "num_shards": 1, "shard_size": 1}
    (folder / "metadata.json").write_text(json.dumps(metadata), encoding="utf-8")
    latent = {"samples": torch.zeros(1, LATENT_CHANNELS, 1, 8, 8)}
    torch.save({"latents": [latent], "conditioning": [[[embedding, {}]]]}, folder / SHARD)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    folder = Path(sys.argv[1])
    try:
        for path in make(folder).values():
            print(f"{path} ({path.stat().st_size / 1e6:.1f} MB)")
        print(f"{', '.join(TRAINED_FILES)}: {'trained' if make_trained(folder) else 'random weights'}")
    except HostError as error:
        sys.exit(f"[tiny models] {error}")
