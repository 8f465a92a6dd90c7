# Trains the example's model in Python, of torch's own layers, and runs the program on two ranks
# from the same weights: the same losses. transformer_in_python.py DDPRUN PROGRAM REPOSITORY FOLDER
import pathlib
import re
import subprocess
import sys

import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data.distributed import DistributedSampler

ddprun, program, repository, folder = sys.argv[1], sys.argv[2], *map(pathlib.Path, sys.argv[3:])
torch.set_num_threads(1)
STEPS, WARMUP, RANKS, BATCH, CONTEXT, WIDTH, HEADS, LAYERS = 30, 10, 2, 8, 32, 32, 4, 2
LR, CLIP, SEED = 0.01, 0.5, 5


class Model(nn.Module):
    def __init__(self, vocabulary):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, WIDTH)  # of the head, too
        nn.init.normal_(self.tokens.weight, 0, WIDTH ** -0.5)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH, HEADS, 4 * WIDTH, dropout=0, activation="gelu", batch_first=True, norm_first=True)
            for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, characters):
        length = characters.size(1)
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        x = self.tokens(characters) + self.positions(torch.arange(length))
        for layer in self.layers:
            x = layer(x, src_mask=mask)
        return nn.functional.linear(self.norm(x), self.tokens.weight)


def windows_of(text):
    places = {character: place for place, character in enumerate(sorted(set(text)))}
    numbers = torch.tensor([places[character] for character in text])
    numbers = numbers[: len(text) - len(text) // 10]  # the last tenth is held out
    starts = range(0, len(numbers) - CONTEXT, CONTEXT)
    return len(places), torch.stack([numbers[start:start + CONTEXT + 1] for start in starts])


def batches(count):
    """The windows of every step, of both ranks together."""
    samplers = [DistributedSampler(range(count), RANKS, rank, seed=SEED) for rank in range(RANKS)]
    epoch = 0
    while True:
        for sampler in samplers:
            sampler.set_epoch(epoch)
        orders = [list(sampler) for sampler in samplers]
        for start in range(0, len(orders[0]) - BATCH + 1, BATCH):
            yield sum((order[start:start + BATCH] for order in orders), [])
        epoch += 1


def train(model, windows, amp):
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    schedule = lr_scheduler.SequentialLR(
        optimizer, milestones=[WARMUP], schedulers=[
            lr_scheduler.LinearLR(optimizer, start_factor=1 / WARMUP, total_iters=WARMUP),
            lr_scheduler.CosineAnnealingLR(optimizer, STEPS - WARMUP)])
    indices = batches(len(windows))
    for _ in range(STEPS):
        batch = windows[next(indices)]
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            logits = model(batch[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        schedule.step()
        yield loss.item()


def run(*arguments):
    command = [
        ddprun, "-n", RANKS, program, "--text", folder / "text", "--load", folder / "start.pt", "--steps", STEPS,
        "--warmup", WARMUP, "--context", CONTEXT, "--width", WIDTH, "--heads", HEADS, "--layers", LAYERS, "--lr",
        LR, "--clip", CLIP, "--seed", SEED, "--dropout", 0, "--report-every", 1, "--sample", 0, "--save",
        folder / "end.pt", *arguments]
    result = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if result.returncode != 0:
        sys.exit(f"FAILED: {arguments} ended with {result.returncode}: {result.stdout}{result.stderr}")
    return [float(loss) for loss in re.findall(r"step \d+/\d+: loss ([\d.]+),", result.stdout)]


def compare(name, losses, expected, tolerance):
    assert len(losses) == STEPS, f"{name}: expected {STEPS} losses, got {len(losses)}"
    worst = max(abs(got - want) for got, want in zip(losses, expected))
    print(f"{name}: {losses[0]:.5f} to {losses[-1]:.5f}, at most {worst:.1e} from Python's")
    if not worst <= tolerance:
        sys.exit(f"FAILED: {name}: expected losses within {tolerance} of {expected}, got {losses}")


# 12,000 characters: an epoch has 337 windows and 21 steps, so that a second one begins. Some are not ASCII.
text = (repository / "docs/faults.md").read_text()[:11990] + "äöü → ß\n"
(folder / "text").write_text(text)
vocabulary, windows = windows_of(text)
torch.manual_seed(3)
start = Model(vocabulary).state_dict()
torch.save(start, folder / "start.pt")


def in_python(amp=False):
    model = Model(vocabulary)
    model.load_state_dict(start)
    return model, list(train(model, windows, amp))


trained, expected = in_python()
assert expected[-1] < expected[0] - 0.5, f"Python did not learn: {expected}"
for name, arguments in {
    "plain": ["--batch-size", BATCH],
    "2 passes a step, blocks computed twice": [
        "--batch-size", BATCH // 2, "--accumulate", 2, "--checkpoint-activations"],
    "AdamW's state divided": ["--batch-size", BATCH, "--zero", 1],
    "gradients divided, 2 passes": ["--batch-size", BATCH // 2, "--accumulate", 2, "--zero", 2],
    "layers divided": ["--batch-size", RANKS * BATCH, "--tp", RANKS],
}.items():
    compare(name, run(*arguments), expected, 1e-4)
    ended = torch.load(folder / "end.pt", weights_only=True)
    for key, value in trained.state_dict().items():
        difference = (ended.pop(key) - value).abs().max().item()
        assert difference < 1e-2, f"{name}: {key} ended {difference} from Python's"
    assert not ended, f"{name}: expected Python's names, got {list(ended)} beside them"
# In bfloat16 rounding differs: Python's attention is one fused operation.
compare("in bfloat16", run("--batch-size", BATCH, "--amp"), in_python(amp=True)[1], 2e-2)
