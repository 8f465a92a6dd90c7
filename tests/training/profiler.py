# Compares the profiler with Python's: the same names and counts in the same steps, and the same
# tables of the same events. profiler.py PROGRAM
import json
import random
import subprocess
import sys

import torch
from torch.autograd import DeviceType
from torch.autograd.profiler import profile as autograd_profile
from torch.autograd.profiler_util import EventList

program = sys.argv[1]
torch.set_num_threads(1)
FIELDS = (
    "name start_ns end_ns start_thread_id end_thread_id correlation_id linked_correlation_id nbytes device_type "
    "is_async is_hidden_event is_user_annotation shapes"
).split()
DEVICES = {0: DeviceType.CPU, 1: DeviceType.CUDA}


def run(*arguments, text=""):
    result = subprocess.run([program, *arguments], input=text, capture_output=True, text=True)
    if result.returncode != 0:
        sys.exit(f"FAILED: {arguments} ended with {result.returncode}: {result.stderr}")
    return result.stdout


class Event:
    """A recorded event, with the methods of Kineto's."""

    def __init__(self, line):
        values = line.split("\t")
        for field, value in zip(FIELDS, values, strict=True):
            if field == "device_type":
                value = DEVICES[int(value)]
            elif field == "shapes":
                value = json.loads(value)
            elif field.startswith("is_"):
                value = value == "1"
            elif field != "name":
                value = int(value)
            setattr(self, field, lambda value=value: value)

    def __getattr__(self, field):
        constants = dict(
            overload_name="", fwd_thread_id=0, concrete_inputs=[], kwinputs={}, stack=[], scope=0, sequence_nr=-1,
            device_index=0, device_resource_id=0, flops=0, metadata_json="", cuda_elapsed_us=-1,
        )  # fmt: skip
        return lambda: constants[field]


class Result:
    def __init__(self, text):
        start, *lines = text.splitlines()
        self.trace_start_ns = lambda: int(start)
        recorded = [Event(line) for line in lines]
        self.events = lambda: recorded


def tables_in_python(text):
    for device in (None, "cuda"):
        profiler = autograd_profile(use_kineto=True)
        profiler.use_device = device
        parsed = profiler._parse_kineto_results(Result(text))
        for shapes in (False, True):
            for memory in (False, True):
                events = EventList(parsed, use_device=device, profile_memory=memory)
                for event in events:
                    event.cpu_parent, event.cpu_children = None, []
                events._build_tree()
                averages = events.key_averages(group_by_input_shapes=shapes)
                for key in (
                    "", "cpu_time_total", "self_cpu_time_total", "cpu_time", "count", "cpu_memory_usage",
                    "self_cpu_memory_usage", "cuda_time_total", "self_cuda_memory_usage",
                ):  # fmt: skip
                    yield f"== {device.upper() if device else ''} {shapes:d}{memory:d} {key}\n"
                    yield averages.table(
                        sort_by=key.replace("cuda", "device") or None, row_limit=-1 if memory else 5
                    )


def compare_tables(what, text):
    ours = run("tables", text=text).splitlines()
    pythons = "".join(tables_in_python(text)).splitlines()
    for line, (got, want) in enumerate(zip(ours, pythons)):
        if got != want:
            sys.exit(f"FAILED: {what}, line {line}:\nexpected {want}\ngot      {got}")
    if len(ours) != len(pythons):
        sys.exit(f"FAILED: {what}: expected {len(pythons)} lines, got {len(ours)}")
    return ours


def draw_events(seed):
    """Nested calls on three threads, kernels, memory, and events that the profilers treat specially."""
    draw = random.Random(seed)
    names = ["aten::mm", "aten::sum", "aten::sum", "ProfilerStep#3", "ProfilerStep#4", "mine", "ä" * 60, "t"]
    names += ["aten::is_leaf", "N2at6TensorE", "_ZN3c106Scalar3toIEv", "x" * 51, "x" * 52]
    lines = []
    ids = [0]

    def add(name, start, end, thread, end_thread=None, linked=0, nbytes=0, device=0, asynchronous=0, hidden=0):
        ids[0] += 1
        annotated = int(name in ("mine", "ProfilerStep#3", "ProfilerStep#4"))
        shapes = draw.choice([[], [[4, 8], [8], []], [[4, 8]], [[1]] * 40])
        fields = [name, start, end, thread, end_thread or thread, ids[0], linked, nbytes, device, asynchronous]
        lines.append("\t".join(map(str, fields + [hidden, annotated, json.dumps(shapes)])))
        return ids[0]

    def call(start, end, thread, depth):
        name = draw.choice(names)
        number = add(name, start, end, thread)
        for _ in range(draw.choice([0, 0, 1, 2])):
            at = draw.randint(start, end)
            add("kernel_" + draw.choice("ab"), at + 500, at + 500 + draw.randint(1, 3000), 7, linked=number, device=1)
            # A call of the runtime, which CUPTI reports under its own thread number.
            add("cudaLaunchKernel", at, min(at + 100, end), 1000 + thread, linked=number)
        if draw.random() < 0.3:
            nbytes = draw.choice([64, -64, 5000, 3 << 20, -(5 << 30)])
            add("[memory]", draw.randint(start, end), end, thread, nbytes=nbytes, device=draw.choice([0, 0, 1]))
        at = start
        while depth < 4 and draw.random() < 0.75:
            begin = draw.randint(at, end)
            until = draw.randint(begin, end)
            if draw.random() < 0.05:
                until = end + 10  # overlaps in part
            call(begin, max(begin, until), thread, depth + 1)
            at = min(until, end)
            if draw.random() < 0.3:
                break

    start = 10**18
    for thread in (1, 2, 3):
        at = start
        for _ in range(15):
            end = at + draw.randint(0, 2_000_000_000 if draw.random() < 0.1 else 200_000)
            call(at, end, thread, 0)
            if draw.random() < 0.3:
                add("[memory]", end + 1, end + 1, thread, nbytes=draw.randint(-100, 4000))
            at = end + draw.randint(0, 50)
    add("sent", start + 5, start + 500_000, 1, end_thread=2)
    add("waited", start + 7, start + 500, 2, asynchronous=1)
    add("unseen", start + 7, start + 500, 2, hidden=1)
    add("[OutOfMemory]", start + 100, start + 100, 1, nbytes=123)
    draw.shuffle(lines)
    return "\n".join([str(start), *lines]) + "\n"


def mlp_counts():
    w1 = torch.full((16, 8), 0.1, requires_grad=True)
    w2 = torch.full((4, 16), 0.2, requires_grad=True)
    bias = torch.zeros(4, requires_grad=True)

    def step():
        with torch.profiler.record_function("forward"):
            hidden = torch.relu(torch.mm(torch.ones(32, 8), w1.t()))
            loss = torch.addmm(bias, hidden, w2.t()).pow(2).sum()
        with torch.profiler.record_function("backward"):
            loss.backward(torch.ones(()))
            with torch.no_grad():
                for weight in (w1, w2, bias):
                    weight.add_(weight.grad, alpha=-1e-3)

    ready = []
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        schedule=torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=1),
        on_trace_ready=ready.append,
    ) as profiler:
        for _ in range(5):
            step()
            profiler.step()
    return [f"{entry.key}\t{entry.count}" for entry in profiler.key_averages()] + [f"ready\t{len(ready)}"]


ours, pythons = run("counts").splitlines(), mlp_counts()
if sorted(ours) != sorted(pythons):
    sys.exit(f"FAILED: names and counts: expected {set(pythons) - set(ours)}, got {set(ours) - set(pythons)}")
assert "ProfilerStep*\t2" in ours and "forward\t2" in ours and len(ours) > 25, ours

lines = compare_tables("an MLP's step", run("record"))
assert any("AddmmBackward0" in line for line in lines) and any("[memory]" in line for line in lines)
seen = ""
for seed in range(3):
    seen += "\n".join(compare_tables(f"events drawn with seed {seed}", draw_events(seed)))
for part in ("Self CUDA %", "CUDA Mem", "Input Shapes", "ProfilerStep*", " GB", "kernel_a", "[OutOfMemory]", "..."):
    assert part in seen, part
assert "no other recording in this process" in run("elsewhere")
print("the same names, counts and tables as Python's")
