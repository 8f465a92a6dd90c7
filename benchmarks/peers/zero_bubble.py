"""What the zero-bubble schedule ZB-H1 would gain: times a transformer's stage forward, backward in one
walk, and backward in two as torch.distributed.pipelining does it, for inputs and then for weights.

Prints a step of m micro-batches through P stages by 1F1B and by ZB-H1, of the papers' lengths
(m + P - 1) (F + B + W) and m (F + B + W) + (P - 1) (F + B - W), and what ZB-H1 saves beside 1F1B and
beside two interleaved stages a rank.
"""

import argparse
import statistics
import time

import torch
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

SHAPES = ((256, 64, 8), (512, 128, 4), (512, 128, 1))  # features, positions, samples
LAYERS = 2
PIPELINES = ((2, 8), (4, 8), (4, 32))


def make_stage(features):
    return torch.nn.Sequential(*(
        torch.nn.TransformerEncoderLayer(
            features, 8, 4 * features, dropout=0.0, batch_first=True, norm_first=True,
            activation="gelu")
        for _ in range(LAYERS)))


def milliseconds(of):
    begin = time.thread_time()  # one thread computes
    result = of()
    return 1000 * (time.thread_time() - begin), result


def times_of(features, positions, samples, repeats):
    """Returns the medians of forward, backward in one walk, for inputs, and for weights."""
    stage = make_stage(features)
    batch = torch.randn(samples, positions, features)
    times = ([], [], [], [])
    for _ in range(repeats + 2):
        stage.zero_grad()
        leaf = batch.detach().requires_grad_()
        forward, output = milliseconds(lambda: stage(leaf))
        gradient = torch.ones_like(output)
        once, _ = milliseconds(lambda: output.backward(gradient))
        stage.zero_grad()
        leaf = batch.detach().requires_grad_()
        output = stage(leaf)
        inputs, (_, groups) = milliseconds(lambda: stage_backward_input(
            [output], [gradient], [leaf], iter(stage.parameters())))
        weights, _ = milliseconds(lambda: stage_backward_weight(iter(stage.parameters()), groups))
        for of_kind, value in zip(times, (forward, once, inputs, weights)):
            of_kind.append(value)
    return [statistics.median(of_kind[2:]) for of_kind in times]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for features, positions, samples in SHAPES:
        forward, once, inputs, weights = times_of(features, positions, samples, repeats)
        print(f"{features} features, {positions} positions, {samples} samples: F {forward:.1f} ms, "
              f"backward {once:.1f}; in two walks {inputs:.1f} + {weights:.1f}, "
              f"{(inputs + weights) / once:.2f} of one")
        for ranks, microbatches in PIPELINES:
            all_of_one = forward + once
            plain = (microbatches + ranks - 1) * all_of_one
            interleaved = (microbatches + (ranks - 1) / 2) * all_of_one
            zero = (microbatches * (forward + inputs + weights)
                    + (ranks - 1) * (forward + inputs - weights))
            print(f"  P = {ranks}, m = {microbatches}: ZB-H1 saves {100 * (1 - zero / plain):.1f}% "
                  f"of 1F1B, {100 * (1 - zero / interleaved):.1f}% of two interleaved stages")


if __name__ == "__main__":
    main()
