"""ddp_bench for Python's DistributedDataParallel: the same models, turns, and lines of JSON.

    ddprun -n 2 python3 ddp_peer.py --model mlp --modes none,py_ddp --iters 20 --rounds 5

Needs torch and nothing else; torchrun starts it as well.
"""

import argparse
import ctypes
import json
import math
import os
import sys
import time
import warnings

# torch would warn on every rank that NumPy is missing, which is not needed here.
warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
if os.environ.get("RANK", "0") != "0":  # other ranks' warnings say the same as rank 0's
    warnings.simplefilter("ignore")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from memory_sampler import MemorySampler, own_bytes
from peer_models import MODELS, make_task
from peer_statistics import overlap, paired_ratio, quantile

MODES = {
    "none": None,
    "py_ddp": {},
    "py_ddp_view": {"gradient_as_bucket_view": True},
    "py_ddp_unused": {"find_unused_parameters": True},
    "py_ddp_static": {"static_graph": True},
    "py_ddp_hook": {},  # with allreduce_hook
}
LEARNING_RATE = 1e-3  # as in engine.cpp
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def device_of(options):
    """As ddp_bench: with NCCL each rank trains on its own GPU."""
    if options.backend != "nccl":
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


class Contestant:
    """A mode that is timed, and its times so far."""

    def __init__(self, mode, options, cap):
        self.mode = mode
        self.cap = cap
        self.device = device_of(options)
        self.task = make_task(
            options.model,
            options.seed,
            dist.get_rank(),
            self.device,
            DTYPES[options.dtype],
            options.batch,
        )
        self.net = self.task.net
        if self.communicates:
            self.net = DistributedDataParallel(
                self.task.net,
                bucket_cap_mb=cap,
                broadcast_buffers=not options.no_broadcast_buffers,
                **MODES[mode],
            )
            if mode == "py_ddp_hook":
                self.net.register_comm_hook(None, allreduce_hook)
        self.optimizer = torch.optim.SGD(self.task.net.parameters(), lr=LEARNING_RATE)
        self.step_ms = []
        self.comm_ms = []
        self.round_step_ms = []  # the median of a round's steps
        self.round_cpu_ms = []  # CPU time of a step; mean of the ranks

    @property
    def communicates(self):
        return MODES[self.mode] is not None

    def label(self):
        return self.mode if self.cap is None else f"{self.mode} at {self.cap:g} MiB"

    def step(self):
        start = time.perf_counter()
        self.optimizer.zero_grad()
        self.task.loss(self.net(self.task.input)).backward()
        if not self.communicates and dist.get_world_size() > 1:
            dist.barrier()
        self.optimizer.step()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - start) * 1000

    def rest(self):
        self.optimizer.zero_grad()

    def bucket_elements(self):
        """The sizes of the buckets after the rebuild, in floats."""
        if not self.communicates:
            return []
        data = self.net._get_ddp_logging_data()
        sizes = data.get("rebuilt_bucket_sizes") or data["bucket_sizes"]
        return [int(size) // 4 for size in sizes.split(",")]

    def parameters(self):
        return [parameter.detach() for parameter in self.task.net.parameters()]


class MessageSender:
    """Sends messages of a step's sizes without any computation."""

    def __init__(self, device):
        self.memory = torch.zeros(0, device=device)

    def send(self, elements):
        if self.memory.numel() < sum(elements):
            self.memory = torch.zeros(sum(elements), device=self.memory.device)
        parts = self.memory[: sum(elements)].split(elements)
        start = time.perf_counter()
        under_way = [dist.all_reduce(part, async_op=True) for part in parts]
        for work in under_way:
            work.wait()
        if self.memory.is_cuda:
            torch.cuda.synchronize()
        return (time.perf_counter() - start) * 1000


def time_steps(contestant, iters):
    cpu_before = time.process_time()
    step_ms = [contestant.step() for _ in range(iters)]
    contestant.round_cpu_ms.append((time.process_time() - cpu_before) * 1000 / iters)
    contestant.round_step_ms.append(quantile(step_ms, 0.5))
    contestant.step_ms += step_ms


def take_turn(contestant, iters, sender):
    contestant.step()  # caches hold another one's
    dist.barrier()
    time_steps(contestant, iters)
    contestant.rest()
    if not contestant.communicates:
        return
    elements = contestant.bucket_elements()
    dist.barrier()
    contestant.comm_ms += [sender.send(elements) for _ in range(max(2, iters // 4))]


def mean_of_ranks(values, device):
    mean = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(mean)
    return (mean / dist.get_world_size()).tolist()


def compete(contestants, options):
    for contestant in contestants:
        for _ in range(options.warmup):
            contestant.step()
        contestant.rest()
    device = device_of(options)
    sender = MessageSender(device)
    for contestant in contestants:
        if contestant.communicates:
            sender.send(contestant.bucket_elements())
    for index in range(options.rounds):
        for contestant in contestants if index % 2 == 0 else reversed(contestants):
            take_turn(contestant, options.iters, sender)
    for contestant in contestants:
        contestant.round_cpu_ms = mean_of_ranks(contestant.round_cpu_ms, device)


def checksum(parameters):
    return sum(values.abs().sum(dtype=torch.float64).item() for values in parameters)


def ranks_unlike_first(parameters):
    """Lists the ranks whose parameters are not, bit for bit, those of rank 0."""
    mine = torch.cat([values.flatten() for values in parameters])
    of_rank_0 = mine.clone()
    dist.broadcast(of_rank_0, 0)
    unlike = torch.zeros(dist.get_world_size(), device=mine.device)
    unlike[dist.get_rank()] = 0 if torch.equal(mine, of_rank_0) else 1
    dist.all_reduce(unlike)
    return unlike.nonzero().flatten().tolist()


def disagreement(contestants):
    """Names the mode or rank that ended with different parameters, as ddp_bench does, or None."""
    contestants = [contestant for contestant in contestants if contestant.communicates]
    for contestant in contestants:
        if not math.isfinite(checksum(contestant.parameters())):
            return f"mode {contestant.label()}: the training diverged."
        ranks = ranks_unlike_first(contestant.parameters())
        if ranks:
            return (
                f"mode {contestant.label()}: expected the same parameters on all ranks, got others "
                f"than rank 0's on {ranks}."
            )
    # Two ranks' sums do not depend on the order; a GPU's kernels add in any order.
    bitwise = dist.get_world_size() <= 2 and contestants and contestants[0].device.type == "cpu"
    for contestant in contestants[1:] if bitwise else []:
        if not all(map(torch.equal, contestant.parameters(), contestants[0].parameters())):
            return (
                f"mode {contestant.label()}: expected the parameters that mode "
                f"{contestants[0].label()} ended with, got others."
            )
    return None


def ratio_fields(name, values, base):
    median, interval, of_rounds = paired_ratio(values, base)
    low, high = interval or (None, None)
    return {
        name: round(median, 5),
        f"{name}_low": low and round(low, 5),
        f"{name}_high": high and round(high, 5),
        f"{name}_of_rounds": [round(ratio, 5) for ratio in of_rounds],
    }


def result_of(contestant, none, options):
    compute_ms = quantile(none.step_ms, 0.5)
    comm_ms = quantile(contestant.comm_ms, 0.5) if contestant.communicates else 0.0
    step_ms = quantile(contestant.step_ms, 0.5)
    return {
        "model": options.model,
        "mode": contestant.mode,
        "backend": options.backend,
        "world": dist.get_world_size(),
        "bucket_cap_mb": contestant.cap if contestant.communicates else None,
        "step_ms": round(step_ms, 4),
        "step_ms_p10": round(quantile(contestant.step_ms, 0.1), 4),
        "step_ms_p90": round(quantile(contestant.step_ms, 0.9), 4),
        **ratio_fields("ratio", contestant.round_step_ms, none.round_step_ms),
        "cpu_ms": round(quantile(contestant.round_cpu_ms, 0.5), 4),
        **ratio_fields("cpu_ratio", contestant.round_cpu_ms, none.round_cpu_ms),
        "compute_ms": round(compute_ms, 4),
        "comm_ms": round(comm_ms, 4),
        "overlap": round(overlap(compute_ms, comm_ms, step_ms), 4),
        "bytes": 4 * sum(contestant.bucket_elements()),
        "checksum": checksum(contestant.parameters()),
    }


def make_contestants(options):
    contestants = []
    if "none" not in options.modes:
        contestants.append(Contestant("none", options, None))
    for mode in options.modes:
        swept = options.sweep if MODES[mode] is not None else None
        for cap in swept or [options.bucket_cap_mb]:
            contestants.append(Contestant(mode, options, cap))
    return contestants


def keep_freed_memory():
    """Keeps page faults out of the steps, as ddp_bench does."""
    trim_threshold, mmap_max = -1, -4  # of malloc.h
    malloc = ctypes.CDLL(None)
    malloc.mallopt(mmap_max, 0)
    malloc.mallopt(trim_threshold, -1)


def run(options):
    """Returns the error of the final parameters, or None."""
    keep_freed_memory()
    torch.set_num_threads(options.threads)
    contestants = make_contestants(options)
    compete(contestants, options)
    none = next(contestant for contestant in contestants if contestant.mode == "none")
    if dist.get_rank() == 0:
        for contestant in contestants:
            if contestant.mode in options.modes:
                print(json.dumps(result_of(contestant, none, options)), flush=True)
    return disagreement(contestants)


def run_memory(options):
    """Prints the memory of the one mode, with malloc's defaults, as users have them."""
    torch.set_num_threads(options.threads)
    sampler = MemorySampler()
    contestant = Contestant(options.modes[0], options, options.bucket_cap_mb)
    for _ in range(options.warmup + options.iters):
        contestant.step()
    peak = sampler.stop()
    result = {
        "model": options.model,
        "mode": contestant.mode,
        "backend": options.backend,
        "world": dist.get_world_size(),
        "bytes": sum(values.nbytes for values in contestant.parameters()),
        "peak_bytes": own_bytes(peak),
        **peak,
    }
    for field in ("peak_bytes", *peak):
        result[field] = int(mean_of_ranks([result[field]], contestant.device)[0])
    if dist.get_rank() == 0:
        print(json.dumps(result), flush=True)


def mebibytes(text):
    value = float(text)
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"expected MiB greater than 0, got '{text}'")
    return value


def modes_from(text):
    modes = text.split(",")
    for mode in modes:
        if mode not in MODES:
            raise argparse.ArgumentTypeError(
                f"expected some of {', '.join(MODES)}, got '{mode}'"
            )
    return modes


def parse_options():
    parser = argparse.ArgumentParser(
        prog="ddp_peer.py", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", choices=list(MODELS), default="mlp")
    parser.add_argument("--modes", type=modes_from, default=["none", "py_ddp"])
    parser.add_argument("--iters", type=int, default=20, help="steps of each mode in a round")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each mode")
    parser.add_argument("--warmup", type=int, default=10, help="steps before, at least 3")
    parser.add_argument("--threads", type=int, default=1, help="per rank")
    parser.add_argument("--seed", type=int, default=1, help="of the parameters and the data")
    parser.add_argument("--backend", choices=["gloo", "nccl"], default="gloo")
    parser.add_argument("--dtype", choices=list(DTYPES), default="float32")
    parser.add_argument("--batch", type=int, default=1, help="times the samples of the model's own")
    parser.add_argument("--bucket-cap-mb", type=mebibytes, default=None)
    parser.add_argument(
        "--sweep",
        type=lambda text: [mebibytes(part) for part in text.split(",")],
        help="run each mode but none once with each of these bucket_cap_mb",
    )
    parser.add_argument("--no-broadcast-buffers", action="store_true")
    parser.add_argument("--memory", action="store_true", help="peak memory of one mode, no times")
    options = parser.parse_args()
    from_one = (options.iters, options.rounds, options.threads, options.batch)
    if min(from_one) < 1 or options.warmup < 3:
        parser.error("--iters, --rounds, --threads and --batch begin at 1, --warmup at 3")
    if options.memory and (len(options.modes) > 1 or options.sweep):
        parser.error("--memory takes one mode and no --sweep")
    return options


def leave(status):
    """Ends the process, but not the interpreter.

    Gloo's threads outlive the group, and take the GIL to release a tensor. While the interpreter
    ends, Python terminates a thread that takes the GIL, which aborts the process.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def main():
    options = parse_options()
    if options.backend == "nccl":
        torch.cuda.set_device(device_of(options))
    dist.init_process_group(options.backend)
    try:
        wrong = run_memory(options) if options.memory else run(options)
    finally:
        dist.destroy_process_group()
    if wrong:
        print(f"ddp_peer.py: {wrong}", file=sys.stderr)
    leave(1 if wrong else 0)


main()
