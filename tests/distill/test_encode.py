"""Samples of videos: the pictures, captions and latents are those that the model would be given."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sparge_core.distill import DistillError, data, encode

from .conftest import TINY, make_model

Command = Callable[..., tuple[int, str]]
MEAN, STD = [0.5] * 16, [2.0] * 16
SEEN = {"image_dim": 24, "in_channels": 36, "added_kv_proj_dim": 32}


@pytest.fixture(scope="session")
def pipelines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny pipelines of random weights in diffusers' format, text-to-video and image-to-video."""
    from diffusers import AutoencoderKLWan
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        CLIPImageProcessor,
        CLIPVisionConfig,
        CLIPVisionModel,
        PreTrainedTokenizerFast,
        UMT5Config,
        UMT5EncoderModel,
    )

    folder = tmp_path_factory.mktemp("pipelines")
    torch.manual_seed(0)
    vae = AutoencoderKLWan(base_dim=4, num_res_blocks=1, latents_mean=MEAN, latents_std=STD)
    config = UMT5Config(vocab_size=8, d_model=TINY["text_dim"], d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    words = Tokenizer(models.WordLevel({"<pad>": 0, "a": 1, "red": 2, "cat": 3, "?": 4}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    made = {}
    for kind, changes in (("t2v", {}), ("i2v", SEEN)):
        place = made[kind] = folder / kind
        make_model(place / "transformer", **changes)
        vae.save_pretrained(place / "vae")
        UMT5EncoderModel(config).save_pretrained(place / "text_encoder")
        PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>").save_pretrained(
            place / "tokenizer"
        )
        if kind == "i2v":
            sizes = {"hidden_size": 24, "intermediate_size": 8, "num_hidden_layers": 2}
            seen = CLIPVisionConfig(**sizes, num_attention_heads=2, image_size=32, patch_size=8)
            CLIPVisionModel(seen).save_pretrained(place / "image_encoder")
            size = {"height": 32, "width": 32}
            CLIPImageProcessor(size=size, crop_size=size).save_pretrained(place / "image_processor")
    return made


def write_video(path: Path, frames: int, *, rate: int = 16, size: tuple[int, int] = (48, 64)) -> Path:
    """A video that brightens by an even step a frame."""
    import av

    with av.open(str(path), "w") as container:
        stream = container.add_stream("ffv1", rate=rate)
        stream.height, stream.width = size
        stream.pix_fmt = "bgr0"
        for number in range(frames):
            picture = torch.full((*size, 3), 10 * number, dtype=torch.uint8)
            picture[:, : size[1] // 2, 0] = 255  # the left half is red, so that a mirrored clip is another
            for packet in stream.encode(av.VideoFrame.from_ndarray(picture.numpy(), format="rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return path


def blue(clip: Tensor) -> list[int]:
    """The last channel's middle value of every frame: 10 × the number of the video's frame."""
    return [int(frame[frame.shape[0] // 2, frame.shape[1] // 2, 2]) for frame in clip]


def test_frames_are_taken_at_sixteen_a_second_whatever_the_video_has(tmp_path: Path) -> None:
    for rate, step in ((16, 1), (32, 2)):
        clip = encode.read_frames(write_video(tmp_path / f"{rate}.mkv", 12, rate=rate), 5, 32, 48)
        assert clip.shape == (5, 32, 48, 3)
        assert blue(clip) == [10 * step * number for number in range(5)]
    slow = encode.read_frames(write_video(tmp_path / "8.mkv", 4, rate=8), 5, 32, 48)
    assert blue(slow) == [0, 10, 10, 20, 20]


def test_a_picture_is_scaled_to_cover_the_size_and_cut_in_the_middle(tmp_path: Path) -> None:
    wide = torch.zeros(20, 80, 3, dtype=torch.uint8)
    wide[:, 40:] = 200
    fitted = encode._fit(wide, 40, 40)
    assert fitted.shape == (40, 40, 3)
    assert fitted[:, :16].max() == 0
    assert fitted[:, 24:].min() == 200


@pytest.mark.parametrize("kind", ["t2v", "i2v"])
def test_a_video_and_its_caption_become_a_sample_that_trains(
    kind: str,
    pipelines: dict[str, Path],
    tmp_path: Path,
    command: Command,
    values: dict[str, Any],
    train: Any,
) -> None:
    from diffusers import AutoencoderKLWan

    videos = tmp_path / "videos"
    videos.mkdir()
    for number, name in enumerate(("one", "two", "bare", "short")):
        write_video(videos / f"{name}.mkv", 3 if name == "short" else 9 + number)
        if name != "bare":
            text = " a cat" if name == "two" else " a red\n cat"
            (videos / f"{name}.txt").write_text(text, encoding="utf-8")
    sizes = ("--frames", 9, "--height", 32, "--width", 48)
    where = ("--videos", videos, "--model", pipelines[kind])
    code, said = command("prepare", tmp_path / "clips", *where, *sizes, "--device", "cpu")
    assert code == 0, said
    assert "bare.mkv: left out, there is no bare.txt." in said
    assert "short.mkv: left out, it has 3 of 9 frames" in said
    assert "2 samples, latents 2 of 3 × 4 × 6" in said

    held = data.open_dataset(tmp_path / "clips")
    captions = [entry.caption for entry in held.entries]
    assert sorted(captions) == ["a cat", "a red\n cat"]
    number = captions.index("a red\n cat")
    sample = held.read(number)
    assert held.entries[number].shapes["text"] == (3, TINY["text_dim"])
    clip = encode.read_frames(videos / "one.mkv", 9, 32, 48)
    vae = AutoencoderKLWan.from_pretrained(pipelines[kind] / "vae")
    with torch.no_grad():
        pixels = clip.permute(3, 0, 1, 2)[None] / 127.5 - 1
        raw = vae.encode(pixels).latent_dist.mode()[0]
        first = torch.cat((pixels[:, :, :1], torch.zeros_like(pixels[:, :, 1:])), dim=2)
        seen = vae.encode(first).latent_dist.mode()[0]
    torch.testing.assert_close(sample.latent, (raw - 0.5) / 2, rtol=2e-3, atol=2e-3)
    if kind == "i2v":
        assert sample.image_latent is not None
        torch.testing.assert_close(sample.image_latent[4:], (seen - 0.5) / 2, rtol=2e-3, atol=2e-3)
        assert sample.image_latent[:4, 0].eq(1).all()
        assert not sample.image_latent[:4, 1:].any()
        assert sample.image_embedding is not None
        assert sample.image_embedding.shape == (17, 24)
    run = {**values, "base": pipelines[kind], "data": tmp_path / "clips", "held_out": 1, "steps": 1}
    code, said = train(run)
    assert code == 0, said


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"frames": 8}, "frames is 8; Wan's clips have 4 n \\+ 1"),
        ({"height": 30}, "both must be multiples of 16"),
        ({"videos": "empty"}, "holds no video"),
        ({"pipeline": "empty"}, "has no config.json"),
        ({"pipeline": "bare"}, "vae cannot be loaded"),
    ],
)
def test_what_cannot_be_encoded_is_named(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    make_model(tmp_path / "bare" / "transformer")
    (tmp_path / "videos").mkdir()
    write_video(tmp_path / "videos" / "one.mkv", 2)
    named = {"videos": "videos", "pipeline": "bare", **change}
    given = {key: tmp_path / value if isinstance(value, str) else value for key, value in named.items()}
    sizes = {"frames": 5, "height": 32, "width": 48, "device": torch.device("cpu"), "out": tmp_path / "out"}
    with pytest.raises(DistillError, match=message):
        list(encode.encode_folder(**{**sizes, **given}))


def test_a_video_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "broken.mp4").write_bytes(b"no video" * 100)
    with pytest.raises(DistillError, match=r"broken\.mp4 cannot be read"):
        encode.read_frames(tmp_path / "broken.mp4", 5, 32, 32)


def test_videos_without_a_pipeline_are_refused(command: Command, tmp_path: Path) -> None:
    code, said = command("prepare", tmp_path / "clips", "--videos", tmp_path)
    assert code == 1
    assert "--videos needs --model" in said
