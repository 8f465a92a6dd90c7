# Python's state_dicts load in PROGRAM (state_dict_interop.cpp), its own load in Python, and training
# continues with the same losses. state_dict_interop.py PROGRAM FOLDER
import json
import os
import subprocess
import sys

import torch

STEPS = 5
OPTIMIZERS = {
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
    "PlainSGD": lambda p: torch.optim.SGD(p, lr=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01, momentum_decay=0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01, decoupled_weight_decay=True),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01, weight_decay=0.1),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.01, rho=0.8),
    "Muon": lambda p: torch.optim.Muon(
        [x for x in p if x.ndim == 2], lr=0.01, ns_steps=4, adjust_lr_fn="match_rms_adamw"),
}


def make_model():
    return torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 1))


def train(model, optimizer, first):
    losses = []
    for step in range(first, first + STEPS):
        x = torch.sin(torch.arange(32.0) * (step + 1)).view(8, 4)
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def save(folder):
    for name, make in OPTIMIZERS.items():
        torch.manual_seed(1)
        model = make_model()
        # Other options than the constructor's: the loaded ones have to replace them.
        optimizer = make(model.parameters())
        for group in optimizer.param_groups:
            group["lr"] = 0.02
        train(model, optimizer, 0)
        wrapped = {"module." + key: value for key, value in model.state_dict().items()}
        torch.save(wrapped if name == "Adam" else model.state_dict(), f"{folder}/{name}.model.pt")
        torch.save(optimizer.state_dict(), f"{folder}/{name}.optimizer.pt")
        with open(f"{folder}/{name}.losses", "w") as out:
            out.writelines(f"{loss:.9g}\n" for loss in train(model, optimizer, STEPS))
    torch.save(make_model(), f"{folder}/whole_model.pt")
    torch.save(torch.zeros(2), f"{folder}/legacy.pt", _use_new_zipfile_serialization=False)
    torch.optim.Adam(make_model().parameters(), maximize=True)
    torch.save(
        torch.optim.Adam(make_model().parameters(), maximize=True).state_dict(),
        f"{folder}/maximize.pt")


def load(folder):
    for name, make in OPTIMIZERS.items():
        model = make_model()
        optimizer = make(model.parameters())
        model.load_state_dict(torch.load(f"{folder}/{name}.model.pt", weights_only=True))
        optimizer.load_state_dict(torch.load(f"{folder}/{name}.optimizer.pt", weights_only=True))
        assert optimizer.param_groups[0]["lr"] == 0.02, optimizer.param_groups
        with open(f"{folder}/{name}.losses") as lines:
            expected = [float(line) for line in lines]
        for got, want in zip(train(model, optimizer, 2 * STEPS), expected, strict=True):
            assert abs(got - want) <= 1e-6, f"{name}: loss {got}, in C++ {want}"
    values = torch.load(f"{folder}/values.pt", weights_only=True)
    assert values["tied"].data_ptr() == values["again"].data_ptr(), "a shared tensor was doubled"
    assert torch.equal(values["view"], torch.arange(10.0)), values["view"]
    assert torch.equal(values["transposed"], torch.arange(6.0).view(2, 3).t()), values
    assert values["half"].dtype == torch.bfloat16, values["half"]
    load_shards(f"{folder}/shards/step-00000003")
    assert os.path.getsize(f"{folder}/values.pt") < 20000, "a view came with its whole storage"


# Puts the tensors of a sharded part together, by the index in the manifest.
def load_shards(folder):
    with open(f"{folder}/manifest.json") as text:
        index = json.load(text)["index"]["model"]
    whole = {}
    for name, tensor in index.items():
        whole[name] = torch.full(tensor["sizes"], -1, dtype=getattr(torch, tensor["dtype"]))
        for file, key, offset, size in tensor["boxes"]:
            box = torch.load(f"{folder}/{file}", weights_only=True)[key]
            whole[name][tuple(slice(o, o + s) for o, s in zip(offset, size, strict=True))] = box
    assert torch.equal(whole["fc.weight"], torch.arange(24.0).view(4, 6)), whole
    assert torch.equal(whole["step"], torch.tensor(7)), whole


if __name__ == "__main__":
    program, root = sys.argv[1:]
    python, cpp = root + "/python", root + "/cpp"
    os.mkdir(python)
    os.mkdir(cpp)
    save(python)
    subprocess.run([program, python, cpp], check=True)
    load(cpp)
