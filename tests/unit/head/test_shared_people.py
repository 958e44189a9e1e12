"""Two synthetic sets that share people: what a head per dataset gains over one softmax, on people of neither set.

A person is a point; an image is a fixed random function of the person, of noise, and of the set that it is from.
docs/log/log.md has the rates of this training.
"""

from statistics import mean

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from facetrain.head.head_group import HeadGroup
from tests.support.heads import make_head, margin_settings

PERSON, NOISE, HIDDEN, PIXELS, SIZE = 24, 24, 128, 96, 32
PEOPLE, IMAGES, STEPS, BATCH, LR = 500, 10, 600, 256, 0.1
TEST_PEOPLE, TEST_IMAGES, FAR = 300, 4, 1e-3


def make_network():
    blocks = [
        layer
        for inputs in (PIXELS, 256)
        for layer in (nn.Linear(inputs, 256), nn.BatchNorm1d(256), nn.PReLU())
    ]
    return nn.Sequential(*blocks, nn.Linear(256, SIZE), nn.BatchNorm1d(SIZE))


def make_set_head(num_classes, seed):
    margin = margin_settings("cosface", m3=0.2, scale=24.0)
    return make_head(
        embedding_size=SIZE, num_classes=num_classes, margin=margin, seed=seed, weight_decay=5e-4
    )


def make_head_or_group(seed, *, separate):
    if not separate:
        return make_set_head(2 * PEOPLE, seed)
    heads = [make_set_head(PEOPLE, seed), make_set_head(PEOPLE, seed + 1000)]
    return HeadGroup(heads, (1.0, 1.0), (0.5, 0.5))


def rate_at_far(seed, *, shared, separate, shift):
    """Train on two sets of 500 people, and return the TAR at a FAR of 0.001 of new people, over pairs of both sets.

    `shared` is the share of the people that are in both sets, `shift` the size of the difference between the sets.
    """
    random = torch.Generator().manual_seed(seed)
    mix, to_pixels = (
        torch.randn(PERSON + NOISE, HIDDEN, generator=random) / 7,
        torch.randn(HIDDEN, PIXELS, generator=random) / 11,
    )
    union = torch.randn(2 * PEOPLE - round(shared * PEOPLE), PERSON, generator=random)
    offsets = shift * torch.randn(2, HIDDEN, generator=random)

    def render(people, images, offset):
        person = people.repeat_interleave(images, 0)
        noise = 1.5 * torch.randn(len(person), NOISE, generator=random)
        pixels = torch.tanh(torch.cat([person, noise], 1) @ mix + offset) @ to_pixels
        return pixels + 0.05 * torch.randn(len(person), PIXELS, generator=random)

    sets = zip((union[:PEOPLE], union[-PEOPLE:]), offsets, strict=True)
    image = torch.cat([render(people, IMAGES, offset) for people, offset in sets])
    label = torch.arange(2 * PEOPLE).repeat_interleave(IMAGES)
    new_people = torch.randn(TEST_PEOPLE, PERSON, generator=random)
    test_image = torch.cat([render(new_people, TEST_IMAGES, offset) for offset in offsets])
    torch.manual_seed(seed)
    network, head = make_network(), make_head_or_group(seed, separate=separate)
    optimizer = torch.optim.SGD(network.parameters(), lr=LR, momentum=0.9, weight_decay=5e-4)
    for step in range(STEPS):
        lr = optimizer.param_groups[0]["lr"] = LR * (1 - step / STEPS)
        head.begin_step(step, lr=lr)
        chosen = torch.randint(0, len(image), (BATCH,), generator=random)
        optimizer.zero_grad()
        head(network(image[chosen]), label[chosen]).backward()
        optimizer.step()
    with torch.no_grad():
        unit = F.normalize(network.eval()(test_image))
    person = torch.arange(TEST_PEOPLE).repeat_interleave(TEST_IMAGES).repeat(2)
    first, second = torch.triu_indices(len(person), len(person), 1)
    score, genuine = (unit @ unit.T)[first, second], person[first] == person[second]
    impostors = score[~genuine].sort(descending=True).values
    threshold = impostors[int(FAR * len(impostors))]
    return float((score[genuine] > threshold).float().mean())


@pytest.mark.long
def test_a_head_per_dataset_beats_one_softmax_if_three_tenths_of_the_people_are_in_both():
    gains = [
        rate_at_far(seed, shared=0.3, separate=True, shift=0.0)
        - rate_at_far(seed, shared=0.3, separate=False, shift=0.0)
        for seed in range(3)
    ]
    assert min(gains) > 0.02 and mean(gains) > 0.05, gains
