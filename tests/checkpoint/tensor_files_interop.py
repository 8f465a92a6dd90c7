# Files of safetensors and of whole models pass between Python and C++ (tensor_files_interop.cpp), and
# ddp_consolidate's are read. tensor_files_interop.py PROGRAM CONSOLIDATE FOLDER
# The bytes of safetensors are made by hand here; where the package is installed, it reads ours, too.
import json
import os
import shutil
import struct
import subprocess
import sys

import torch

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def raw(tensor):
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist()) if tensor.numel() else b""


def write_safetensors(path, tensors, metadata=None):
    header, data = {}, b""
    if metadata:
        header["__metadata__"] = metadata
    for name, tensor in tensors.items():
        begin, data = len(data), data + raw(tensor)
        header[name] = {
            "dtype": NAMES[tensor.dtype], "shape": list(tensor.shape),
            "data_offsets": [begin, len(data)]}
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + data)


def read_safetensors(path):
    with open(path, "rb") as file:
        whole = file.read()
    length = struct.unpack("<Q", whole[:8])[0]
    assert length % 8 == 0, length
    header, data = json.loads(whole[8 : 8 + length]), whole[8 + length :]
    metadata = header.pop("__metadata__", {})
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        dtype = DTYPES[entry["dtype"]]
        assert begin % dtype.itemsize == 0, (name, begin)
        flat = torch.tensor(list(data[begin:end]), dtype=torch.uint8).view(dtype)
        tensors[name] = flat.view(entry["shape"])
    return tensors, metadata


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and raw(a) == raw(b)


def expect_same(got, want, what):
    assert got.keys() == want.keys(), (what, got.keys(), want.keys())
    for name, tensor in want.items():
        assert same(got[name], tensor), (what, name, got[name], tensor)


def all_tensors():
    tensors = {
        name: torch.arange(48, dtype=torch.uint8).view(dtype).view(2, -1)
        for name, dtype in DTYPES.items() if dtype != torch.bool}
    tensors["BOOL"] = torch.tensor([True, False, True])
    tensors["scalar"] = torch.tensor(3.5)
    tensors["empty"] = torch.empty(0, 4)
    tensors["caf\u00e9 \U0001F389 \"\\\n"] = torch.ones(3)
    return tensors


def linear():
    torch.manual_seed(3)
    return torch.nn.Linear(4, 6)


def save(folder):
    write_safetensors(f"{folder}/all.safetensors", all_tensors(), {"by": "\u20ac"})
    write_safetensors(f"{folder}/m-1.safetensors", {"a": torch.ones(2), "b": torch.zeros(3)})
    write_safetensors(f"{folder}/m-2.safetensors", {"c": torch.full((2, 2), 7.0)})
    with open(f"{folder}/m.safetensors.index.json", "w") as index:
        shards = {"a": "m-1.safetensors", "b": "m-1.safetensors", "c": "m-2.safetensors"}
        json.dump({"metadata": {"total_size": 36}, "weight_map": shards}, index)
    state = linear().state_dict()
    # Elements column by column: only their strides say so.
    state["weight"] = state["weight"].t().contiguous().t()
    torch.save(state, f"{folder}/linear.pt")
    write_safetensors(f"{folder}/linear.safetensors", state)


def load_file(path):
    return torch.load(path, weights_only=True)


def check_conversions(folder):
    tensors, metadata = read_safetensors(f"{folder}/all.safetensors")
    expect_same(tensors, all_tensors(), "safetensors")
    assert metadata == {"by": "ddp \"\u00e9\""}, metadata
    expect_same(
        load_file(f"{folder}/index.pt"),
        {"a": torch.ones(2), "b": torch.zeros(3), "c": torch.full((2, 2), 7.0)}, "index")
    try:
        import safetensors.torch
    except ImportError:
        return
    expect_same(safetensors.torch.load_file(f"{folder}/all.safetensors"), all_tensors(), "package")


def consolidate(program, *arguments):
    return subprocess.run([program, *arguments], capture_output=True, text=True)


def check_checkpoints(program, folder):
    checkpoints = f"{folder}/checkpoints"
    full, following = load_file(f"{folder}/full.pt"), load_file(f"{folder}/next.pt")
    for file, part in (("model.pt", "model"), ("model.safetensors", "model"), ("o.pt", "optimizer")):
        done = consolidate(
            program, "--folder", checkpoints, "--part", part, "--output", f"{folder}/{file}")
        assert done.returncode == 0 and not done.stdout, done
        assert f"wrote {folder}/{file} of step 2" in done.stderr, done.stderr
        assert f"checking {checkpoints}/step-00000002/{part}" in done.stderr, done.stderr
    expect_same(load_file(f"{folder}/model.pt"), full, "consolidated")
    tensors, metadata = read_safetensors(f"{folder}/model.safetensors")
    expect_same(tensors, full, "consolidated safetensors")
    assert metadata == {"format": "pt"}, metadata

    # Python goes on where C++ does.
    model = linear()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    model.load_state_dict(load_file(f"{folder}/model.pt"))
    optimizer.load_state_dict(load_file(f"{folder}/o.pt"))
    model(torch.ones(2, 4)).sin().sum().backward()
    optimizer.step()
    for name, tensor in model.state_dict().items():
        assert torch.allclose(tensor, following[name], rtol=0, atol=1e-6), name


def check_refusals(program, folder):
    checkpoints, output = f"{folder}/checkpoints", f"{folder}/out.pt"

    def expect(code, text, *arguments):
        done = consolidate(program, *arguments)
        assert done.returncode == code and text in done.stderr, done
        assert not os.path.exists(output)

    expect(2, "--output is required", "--folder", checkpoints)
    expect(2, "--step", "--folder", checkpoints, "--output", output, "--step", "-1")
    base = ("--folder", checkpoints, "--output", output)
    expect(1, "expected a checkpoint of step 9", *base, "--step", "9")
    expect(1, 'expected a part "net"', *base, "--part", "net")
    shard = f"{checkpoints}/step-00000002/model.shard-00000.pt"
    os.truncate(shard, os.path.getsize(shard) - 1)
    expect(1, f"{shard} is damaged", *base, "--step", "2")
    done = consolidate(program, *base)
    assert done.returncode == 0 and "of step 1" in done.stderr, done
    assert f"left out step 2: {shard} is damaged" in done.stderr, done.stderr
    os.remove(output)
    os.remove(f"{checkpoints}/step-00000001/model.shard-00000.pt")
    expect(1, "expected a whole checkpoint", *base)
    shutil.rmtree(checkpoints)
    expect(1, "expected a folder of checkpoints", *base)


if __name__ == "__main__":
    program, consolidate_program, root = sys.argv[1:]
    python, cpp = root + "/python", root + "/cpp"
    os.mkdir(python)
    os.mkdir(cpp)
    save(python)
    subprocess.run([program, python, cpp], check=True)
    check_conversions(cpp)
    check_checkpoints(consolidate_program, cpp)
    check_refusals(consolidate_program, cpp)
