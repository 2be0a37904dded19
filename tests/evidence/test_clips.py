"""The clips of the evidence run: their captions are true, and the same seed shows the same everywhere."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.evidence import clips
from benchmarks.evidence.captions import TEXT_WIDTH, WORDS, CaptionEmbedding

CPU = torch.device("cpu")
SIZE = (9, 96, 128)
THING = clips.Thing(
    size="large",
    texture="plain",
    colour="red",
    shape="disc",
    motion="moving left",
    radius=20.0,
    start=(0.6, 0.5),
    speed=60.0,
    heading=0.5,
    angle=0.0,
    spin=0.0,
)
SCENE = clips.Scene((THING,), "navy", "smooth", "", "", np.zeros((4, 3)))


def show(scene: clips.Scene) -> Tensor:
    """The scene's video (3, T, H, W) in [0, 1]."""
    return (clips.render([scene], *SIZE, CPU)[0] + 1) / 2


def centres(scene: clips.Scene) -> Tensor:
    """(T, 2): x and y of the middle of what differs from the empty ground, in pixels."""
    differs = (show(scene) - show(replace(scene, things=()))).abs().sum(0) > 0.2
    return torch.stack([frame.nonzero().float().mean(0).flip(0) for frame in differs])


def test_a_seed_and_a_number_make_one_clip_and_others_another() -> None:
    one, same, other = clips.scene(0, 1, 2), clips.scene(0, 1, 2), clips.scene(0, 1, 3)
    assert one.caption == same.caption != other.caption
    assert show(one).equal(show(same))
    assert clips.scene(1, 1, 2).caption != one.caption
    assert clips.scene(0, 2, 2).caption != one.caption


def test_a_clip_in_a_batch_is_the_clip_alone() -> None:
    scenes = [clips.scene(0, 0, number) for number in range(4)]
    assert len({len(scene.things) for scene in scenes}) > 1
    together = clips.render(scenes, *SIZE, CPU)
    for video, scene in zip(together, scenes, strict=True):
        torch.testing.assert_close(video, clips.render([scene], *SIZE, CPU)[0], atol=1e-5, rtol=0)
    assert together.abs().max() <= 1


@pytest.mark.parametrize(
    ("motion", "axis", "sign"),
    [("moving left", 0, -1), ("moving right", 0, 1), ("moving up", 1, -1), ("moving down", 1, 1)],
)
def test_a_thing_moves_as_its_caption_says(motion: str, axis: int, sign: int) -> None:
    way = centres(replace(SCENE, things=(replace(THING, motion=motion, start=(0.5, 0.5)),)))
    steps = way.diff(dim=0)
    assert (steps[:, axis] * sign > 1).all()
    assert (steps[:, 1 - axis].abs() < 0.5).all()


@pytest.mark.parametrize("motion", ["bouncing", "falling", "circling"])
def test_what_bounces_falls_or_circles_stays_in_sight(motion: str) -> None:
    way = clips.track(replace(THING, motion=motion), 200, *SIZE[1:])
    assert (way >= THING.radius - 1e-6).all()
    assert (way <= np.array(SIZE[:0:-1]) - THING.radius + 1e-6).all()
    assert np.ptp(way, axis=0).max() > 20


@pytest.mark.parametrize("colour", clips.COLOURS)
def test_a_thing_has_the_colour_of_its_caption(colour: str) -> None:
    thing = replace(THING, colour=colour)
    x, y = centres(replace(SCENE, things=(thing,)))[0].round().int().tolist()
    shown = show(replace(SCENE, things=(thing,)))[:, 0, y, x]
    distances = {name: (shown - torch.tensor(value)).norm() for name, value in clips.COLOURS.items()}
    assert min(distances, key=lambda name: float(distances[name])) == colour


def test_every_shape_and_texture_looks_different() -> None:
    for field, names in (("shape", clips.SHAPES), ("texture", clips.TEXTURES)):
        videos = [show(replace(SCENE, things=(replace(THING, **{field: name}),))) for name in names]
        for place, one in enumerate(videos):
            assert all((one - other).abs().max() > 0.2 for other in videos[:place])


def test_later_things_hide_earlier_ones() -> None:
    near = replace(THING, colour="blue")
    both = show(replace(SCENE, things=(THING, near)))
    torch.testing.assert_close(both, show(replace(SCENE, things=(near,))), atol=0.3, rtol=0)
    assert (both - show(replace(SCENE, things=(near, THING)))).abs().max() > 0.5


def test_the_light_changes_and_the_ground_pans_as_the_caption_says() -> None:
    empty = replace(SCENE, things=())
    darker, brighter = (
        show(replace(empty, light=name)).mean((0, 2, 3)) for name in ("getting darker", "getting brighter")
    )
    assert (darker.diff() < 0).all()
    assert (brighter.diff() > 0).all()
    for pan, sign in (("panning right", -1), ("panning left", 1)):
        striped = show(replace(empty, pattern="striped", pan=pan))
        moved = round(clips.PAN_SPEED * 4 / clips.FRAMES_A_SECOND)
        torch.testing.assert_close(
            striped[:, 4, :, 20:-20], striped[:, 0].roll(sign * moved, -1)[:, :, 20:-20]
        )


def test_the_embedding_binds_words_to_their_things() -> None:
    embed = CaptionEmbedding(CPU)
    caption = "a large plain red disc bouncing, a small plain red square falling"
    one = embed(caption)
    assert one.shape == (512, TEXT_WIDTH)
    assert one.std() == pytest.approx(1.0, abs=0.05)
    assert one.equal(embed(caption))
    assert one[: len(caption.split())].equal(one[len(caption.split()) : 2 * len(caption.split())])
    first, second = (place for place, word in enumerate(caption.split()) if word == "red")
    assert torch.cosine_similarity(one[first], one[second], dim=0) == pytest.approx(0.5, abs=0.1)
    assert not embed("").any()


def test_every_caption_is_made_of_known_words() -> None:
    captions = [clips.scene(0, 0, number).caption for number in range(300)]
    assert {word for caption in captions for word in caption.replace(",", "").split()} == set(WORDS)
    with pytest.raises(ValueError, match="'cat' is no word of the clips"):
        CaptionEmbedding(CPU)("a large cat")
