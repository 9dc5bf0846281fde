"""Synthetic data sets that can be learned: a run's loss falls, so a wrong gradient shows.

Every item depends on its index and the seed alone, so any rank can make any sample without reading the others. `first`
is the index of the first sample: data that is held out is that of the same seed from where the other ends.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Generator, Tensor
from torch.utils.data import Dataset


class Synthetic(Dataset[dict[str, Tensor]], ABC):
    def __init__(self, samples: int, seed: int, first: int) -> None:
        self.samples, self.seed, self.first = samples, seed, first

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.sample(_generator(self.seed, self.first + index))

    @abstractmethod
    def sample(self, generator: Generator) -> dict[str, Tensor]: ...


class TokenSequences(Synthetic):
    """Sequences that count upwards by a step of their own, with noise: the next token can mostly be guessed."""

    def __init__(
        self, vocab_size: int, length: int, samples: int, seed: int = 0, noise: float = 0.1, first: int = 0
    ) -> None:
        super().__init__(samples, seed, first)
        self.vocab_size, self.length, self.noise = vocab_size, length, noise

    def sample(self, generator: Generator) -> dict[str, Tensor]:
        start = torch.randint(self.vocab_size, (1,), generator=generator)
        step = torch.randint(1, 8, (1,), generator=generator)
        tokens = (start + step * torch.arange(self.length + 1)) % self.vocab_size
        replaced = torch.rand(self.length + 1, generator=generator) < self.noise
        noise = torch.randint(self.vocab_size, (self.length + 1,), generator=generator)
        tokens = torch.where(replaced, noise, tokens)
        return {"input_ids": tokens[:-1], "labels": tokens[1:]}


class ClassVectors(Synthetic):
    """Vectors scattered around one centre per class."""

    def __init__(self, features: int, classes: int, samples: int, seed: int = 0, first: int = 0) -> None:
        super().__init__(samples, seed, first)
        self.centres = torch.randn(classes, features, generator=_generator(seed, -1))

    def sample(self, generator: Generator) -> dict[str, Tensor]:
        target = torch.randint(len(self.centres), (1,), generator=generator)[0]
        inputs = self.centres[target] + torch.randn(self.centres.shape[1], generator=generator)
        return {"inputs": inputs, "targets": target}


class ClassImages(Synthetic):
    """Images with one coarse picture per class, lighter or darker, under noise."""

    def __init__(
        self,
        size: int,
        classes: int,
        samples: int,
        channels: int = 3,
        seed: int = 0,
        noise: float = 0.5,
        first: int = 0,
    ) -> None:
        super().__init__(samples, seed, first)
        self.noise = noise
        coarse = torch.randn(classes, channels, 4, 4, generator=_generator(seed, -1))
        self.pictures = F.interpolate(coarse, size=(size, size), mode="nearest")

    def sample(self, generator: Generator) -> dict[str, Tensor]:
        label = torch.randint(len(self.pictures), (1,), generator=generator)[0]
        light = torch.rand(1, generator=generator) + 0.5
        picture = self.pictures[label]
        noise = torch.randn(picture.shape, generator=generator)
        return {"images": picture * light + self.noise * noise, "labels": label}


def _generator(seed: int, index: int) -> Generator:
    return Generator().manual_seed(seed * 1_000_003 + index + 1)
