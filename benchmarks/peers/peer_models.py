"""The models of ddp_bench in Python: make_task() gives the same parameters and data, to the bit.

Each class mirrors the one of benchmarks/ddp_bench/models/*.cpp, in the order of its parameters.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn


class Mnist(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.fc1 = nn.Linear(64 * 12 * 12, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = F.max_pool2d(x, 2).flatten(1)
        return F.log_softmax(self.fc2(F.relu(self.fc1(x))), 1)


def mlp():
    layers = []
    for i in range(4):
        if i > 0:
            layers.append(nn.ReLU())
        layers.append(nn.Linear(2048, 2048))
    return nn.Sequential(*layers)


def small_params():
    layers = []
    for _ in range(200):
        layers += [nn.Linear(32, 32), nn.LayerNorm(32)]
    return nn.Sequential(*layers)


def convolution(channels_in, channels_out, kernel, stride):
    return nn.Conv2d(channels_in, channels_out, kernel, stride, kernel // 2, bias=False)


class ResidualBlock(nn.Module):
    def __init__(self, channels_in, channels_out, stride):
        super().__init__()
        self.conv1 = convolution(channels_in, channels_out, 3, stride)
        self.bn1 = nn.BatchNorm2d(channels_out)
        self.conv2 = convolution(channels_out, channels_out, 3, 1)
        self.bn2 = nn.BatchNorm2d(channels_out)
        self.shortcut = None
        if stride != 1 or channels_in != channels_out:
            self.shortcut = nn.Sequential(
                convolution(channels_in, channels_out, 1, stride), nn.BatchNorm2d(channels_out)
            )

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return F.relu(y + (x if self.shortcut is None else self.shortcut(x)))


class ResNet18(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(convolution(3, 64, 3, 1), nn.BatchNorm2d(64))
        blocks, channels = [], 64
        for wider in (64, 128, 256, 512):
            blocks.append(ResidualBlock(channels, wider, 1 if wider == channels else 2))
            blocks.append(ResidualBlock(wider, wider, 1))
            channels = wider
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, 10)

    def forward(self, x):
        features = self.blocks(F.relu(self.stem(x)))
        return self.head(features.mean((2, 3)))


VOCABULARY = 1000
LENGTH = 64
WIDTH = 256
HEADS = 8


class TransformerLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def attention(self, x):
        heads = self.qkv(x).view(x.size(0), x.size(1), 3, HEADS, WIDTH // HEADS)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).reshape(x.shape))

    def forward(self, x):
        y = x + self.attention(self.norm1(x))
        return y + self.down(F.gelu(self.up(self.norm2(y))))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.Sequential(*(TransformerLayer() for _ in range(6)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x):
        embedded = self.tokens(x) + self.positions.weight
        return self.head(self.norm(self.layers(embedded))).flatten(0, 1)


# name: its factory, the shape of the input, the bound of its integers (0: normally distributed), and
# the shape and bound of the target
MODELS = {
    "mnist": (Mnist, (32, 1, 28, 28), 0, (32,), 10),
    "mlp": (mlp, (32, 2048), 0, (32, 2048), 0),
    "small_params": (small_params, (8, 32), 0, (8, 32), 0),
    "resnet18": (ResNet18, (16, 3, 32, 32), 0, (16,), 10),
    "transformer": (Transformer, (4, LENGTH), VOCABULARY, (4 * LENGTH,), VOCABULARY),
}


class Task:
    """A network and one batch of random data, the same in every step."""

    def __init__(self, net, inputs, target, classifies):
        self.net = net
        self.input = inputs
        self.target = target
        self.classifies = classifies

    def loss(self, output):
        if self.classifies:
            return F.cross_entropy(output, self.target)
        return F.mse_loss(output, self.target, reduction="sum") / self.target.size(0)


def initialize(net, seed):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, values in net.named_parameters():
            if values.dim() > 1:
                bound = 1 / math.sqrt(values.numel() // values.size(0))
                values.uniform_(-bound, bound, generator=generator)
            elif name.endswith("bias"):
                values.zero_()


def draw(shape, bound, generator):
    if bound > 0:
        return torch.randint(bound, shape, generator=generator)
    return torch.randn(shape, generator=generator)


def make_task(model, seed, rank, device="cpu", dtype=torch.float32, batch=1):
    """The parameters depend on the seed alone, the data on seed and rank.

    batch: factor of the model's own batch size.
    """
    make, input_shape, vocabulary, target_shape, classes = MODELS[model]
    net = make()
    initialize(net, seed)
    net.to(device, dtype)

    def placed(data):
        return data.to(device, dtype if data.is_floating_point() else data.dtype)

    def shape(sizes):
        return (sizes[0] * batch, *sizes[1:])

    generator = torch.Generator().manual_seed(seed + 1 + rank)
    inputs = placed(draw(shape(input_shape), vocabulary, generator))
    target = placed(draw(shape(target_shape), classes, generator))
    return Task(net, inputs, target, classes > 0)
