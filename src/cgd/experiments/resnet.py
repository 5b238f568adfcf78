"""ResNet-56 for images of 32 × 32 pixels (He et al. 2016), trained on CIFAR-100: the frozen part of a network.

The weights are those of `chenyaofo/pytorch-cifar-models` on GitHub (BSD-3), whose names of parameters are used here:
three stages of nine blocks with 16, 32 and 64 channels, and a projection where the number of channels changes.
"""

from __future__ import annotations

import hashlib
import io
import pickle
from typing import TYPE_CHECKING

import torch
from torch import nn

from cgd.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

BLOCKS = 9
CHANNELS = (16, 32, 64)
FEATURES = CHANNELS[-1]

# The mean and the deviation of the red, green and blue of CIFAR-100, with which the network was trained.
MEAN = (0.5070, 0.4865, 0.4409)
DEVIATION = (0.2673, 0.2564, 0.2761)

WEIGHTS_FILE = "cifar100_resnet56-f2eff4c8.pt"
WEIGHTS_SHA256 = "f2eff4c8461ca1e0d39af83a65f7243bf7d29ec421efee3064bcee93a3caaa73"
WEIGHTS_URL = f"https://github.com/chenyaofo/pytorch-cifar-models/releases/download/resnet/{WEIGHTS_FILE}"
MAX_WEIGHTS_BYTES = 1 << 24
CLASSIFIER = ("fc.weight", "fc.bias")


class BasicBlock(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = nn.Sequential()
        if inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of the block."""
        y = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(y)) + self.downsample(x))


class ResNet56(nn.Module):
    """The network without its last layer: images to 64 features, the means of the last channels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, CHANNELS[0], 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(CHANNELS[0])
        self.layer1 = _stage(CHANNELS[0], CHANNELS[0], 1)
        self.layer2 = _stage(CHANNELS[0], CHANNELS[1], 2)
        self.layer3 = _stage(CHANNELS[1], CHANNELS[2], 2)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the features of images, given as bytes of red, green and blue."""
        mean, deviation = (torch.tensor(each).reshape(3, 1, 1) for each in (MEAN, DEVIATION))
        x = torch.relu(self.bn1(self.conv1((images / 255 - mean) / deviation)))
        return self.layer3(self.layer2(self.layer1(x))).mean(dim=(2, 3))  # type: ignore[no-any-return]


def _stage(inputs: int, outputs: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        BasicBlock(inputs, outputs, stride), *(BasicBlock(outputs, outputs, 1) for _ in range(BLOCKS - 1))
    )


def load(path: Path) -> ResNet56:
    """Return the trained network, for inference only.

    Nothing of the file is parsed before its digest has been checked.

    Raises:
        InputError: it cannot be read, is not the published file, or has the parameters of another network.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_WEIGHTS_BYTES + 1)
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}); download it again from {WEIGHTS_URL}") from None
    digest = hashlib.sha256(content).hexdigest()
    if digest != WEIGHTS_SHA256:
        size = f"more than {MAX_WEIGHTS_BYTES}" if len(content) > MAX_WEIGHTS_BYTES else str(len(content))
        raise InputError(
            f"{path} is not the published file: it has {size} bytes, and their sha256 is {digest}, not "
            f"{WEIGHTS_SHA256}; download it again from {WEIGHTS_URL}"
        )
    network = ResNet56()
    try:
        weights = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        network.load_state_dict({name: value for name, value in weights.items() if name not in CLASSIFIER})
    except (pickle.UnpicklingError, RuntimeError, AttributeError):  # without torch's reason, which lists 343 names
        raise InputError(
            f"{path} does not contain the parameters of this ResNet-56, but those of another network or none; "
            f"download it again from {WEIGHTS_URL}"
        ) from None
    return network.eval().requires_grad_(False)
