"""Python's part of scripts/gpu_check.sh's census: the CUDA calls of steps, and the times of calls.

    share_gpu.sh 2 python3 cuda_census.py census|times

Names, models and fields are those of tests/ddp/cuda/census. Calls come from torch's profiler, which sees NCCL's
and cuBLAS's, too: NCCL's kernels are left out, the others are as in mode `none`, above which both censuses count.
"""

import collections
import json
import sys
import time
import warnings

warnings.filterwarnings("ignore", message="Failed to initialize NumPy")

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

LAYERS, WIDTH = 16, 64  # as in census.h
UNITS, UNIT_WIDTH = 8, 256
COUNTED = 2  # steps
# The names of the CUDA runtime's and the driver's calls, and of which field of a line they are.
FIELDS = {
    "launches": ["cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx"],
    "graph_launches": ["cudaGraphLaunch"],
    "copies": ["cudaMemcpyAsync"],
    "memsets": ["cudaMemsetAsync"],
    "event_records": ["cudaEventRecord", "cudaEventRecordWithFlags"],
    "event_creates": ["cudaEventCreate", "cudaEventCreateWithFlags"],
    "queries": ["cudaEventQuery", "cudaStreamQuery"],
    "stream_waits": ["cudaStreamWaitEvent"],
    "synchronizations": ["cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy"],
    "allocations": ["cudaMalloc"],
    "host_allocations": ["cudaHostAlloc"],
}


def count_fields(names, nccl_kernels):
    """Calls a step, of the names of all calls of COUNTED steps, without NCCL's launches."""
    counts = collections.Counter(names)
    fields = {field: sum(counts[call] for call in calls) for field, calls in FIELDS.items()}
    fields["launches"] -= nccl_kernels
    return {field: number / COUNTED for field, number in fields.items()}


def say(part, name, **fields):
    if dist.get_rank() == 0:
        line = {"part": part, "name": name, "by": "Python", "ranks": dist.get_world_size(), **fields}
        print(json.dumps(line), flush=True)


def count_calls(name, step, warmup=5):
    for _ in range(warmup):
        step()
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000_000)
    woke = torch.cuda.Event()
    woke.record()
    begin = time.perf_counter()
    for _ in range(COUNTED):
        step()
    host_ms = (time.perf_counter() - begin) * 1000 / COUNTED
    ran_ahead = not woke.query()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(COUNTED):
            step()
    events = profiler.events()
    nccl_kernels = sum(
        event.name.startswith("nccl") and event.device_type == torch.autograd.DeviceType.CUDA for event in events)
    calls = [event.name for event in events if event.device_type == torch.autograd.DeviceType.CPU]
    fields = count_fields(calls, nccl_kernels)
    # The profiler itself waits when it ends.
    fields["synchronizations"] = max(fields["synchronizations"] - 1 / COUNTED, 0)
    say("census", name, ran_ahead=ran_ahead, host_ms=host_ms, **fields)


def layers(normalizes=False):
    torch.manual_seed(1)
    modules = []
    for _ in range(LAYERS):
        modules.append(torch.nn.Linear(WIDTH, WIDTH))
        if normalizes:
            modules.append(torch.nn.BatchNorm1d(WIDTH))
    return torch.nn.Sequential(*modules).cuda()


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)


def step_of(net, optimizer, width, clip=None):
    x = torch.ones(32, width, device="cuda")

    def step():
        optimizer.zero_grad()
        net(x).mean().backward()
        if clip is not None:
            clip()
        optimizer.step()

    return step


def census_wrapper(name, hook=False, **options):
    net = DistributedDataParallel(layers(), **options)
    if hook:
        net.register_comm_hook(None, allreduce_hook)
    count_calls(name, step_of(net, adamw(net.parameters()), WIDTH))


def census_of_models():
    for name, normalizes in (("none", False), ("none_batch_norm", True)):
        net = layers(normalizes)
        count_calls(name, step_of(net, adamw(net.parameters()), WIDTH))
    census_wrapper("ddp")
    census_wrapper("ddp_view", gradient_as_bucket_view=True)
    census_wrapper("ddp_buckets", bucket_cap_mb=0.05)
    census_wrapper("ddp_unused", find_unused_parameters=True)
    census_wrapper("ddp_hook", hook=True)
    from torch.distributed.optim import ZeroRedundancyOptimizer
    net = DistributedDataParallel(layers())
    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, lr=1e-3, fused=True)
    count_calls("zero1", step_of(net, optimizer, WIDTH))
    net = DistributedDataParallel(layers())
    clip = lambda: torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    count_calls("clip", step_of(net, adamw(net.parameters()), WIDTH, clip))
    net = DistributedDataParallel(torch.nn.SyncBatchNorm.convert_sync_batchnorm(layers(normalizes=True)))
    count_calls("sync_batch_norm", step_of(net, adamw(net.parameters()), WIDTH))


def sharded(**options):
    from torch.distributed.fsdp import fully_shard
    torch.manual_seed(1)
    net = torch.nn.Sequential(*(torch.nn.Linear(UNIT_WIDTH, UNIT_WIDTH) for _ in range(UNITS))).cuda()
    for layer in net:
        fully_shard(layer, **options)
    fully_shard(net, **options)
    return net


def census_of_cut_models():
    from torch.distributed.fsdp import MixedPrecisionPolicy
    low = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for name, options in (("fsdp", {}), ("fsdp_kept", {"reshard_after_forward": False}),
                          ("fsdp_bfloat16", {"mp_policy": low})):
        net = sharded(**options)
        count_calls(name, step_of(net, adamw(net.parameters()), UNIT_WIDTH))
    net = sharded()
    clip = lambda: torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    count_calls("fsdp_clip", step_of(net, adamw(net.parameters()), UNIT_WIDTH, clip))
    census_of_tensor_parallel()
    if dist.get_world_size() > 1:
        census_of_pipelines()


def census_of_tensor_parallel():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    net = torch.nn.Sequential(
        torch.nn.Linear(UNIT_WIDTH, 4 * UNIT_WIDTH), torch.nn.GELU(), torch.nn.Linear(4 * UNIT_WIDTH, UNIT_WIDTH),
    ).cuda()
    net = parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    count_calls("tensor_parallel", step_of(net, optimizer, UNIT_WIDTH))


def census_of_pipelines():
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x = torch.ones(64, UNIT_WIDTH, device="cuda")
    for name, schedule_type in (("gpipe", ScheduleGPipe), ("1f1b", Schedule1F1B)):
        layer = torch.nn.Linear(UNIT_WIDTH, UNIT_WIDTH).cuda()
        part = x[:8]  # shapes that are given are not exchanged, for which NumPy would have to be there
        stage = PipelineStage(layer, rank, ranks, torch.device("cuda"), input_args=(part,), output_args=(part,))
        schedule = schedule_type(stage, 8, loss_fn=torch.nn.functional.mse_loss)
        optimizer = adamw(layer.parameters())

        def step():
            optimizer.zero_grad()
            inputs = (x,) if rank == 0 else ()
            schedule.step(*inputs, **({"target": x} if rank + 1 == ranks else {}))
            optimizer.step()

        count_calls(name, step)


def say_time(name, call, warmup=3, repeats=9):
    for _ in range(warmup):
        call()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) * 1000)
    say("times", name, ms=sorted(times)[repeats // 2])


def times():
    net = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(400))).cuda()
    small = list(net.parameters())
    for p in small:
        p.grad = torch.ones_like(p)
    say_time("adamw_800", adamw(small).step)
    say_time("adamw_800_foreach", torch.optim.AdamW(small, lr=1e-3, foreach=True).step)
    say_time("clip_800", lambda: torch.nn.utils.clip_grad_norm_(small, 1e9))
    large = torch.ones(2**28, device="cuda", requires_grad=True)
    large.grad = torch.ones_like(large)
    say_time("adamw_268M", adamw([large]).step)
    del large
    net = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(100))).cuda()
    x = torch.ones(32, WIDTH, device="cuda")
    wrapper = DistributedDataParallel(net)
    say_time("step", step_of(wrapper, adamw(net.parameters()), WIDTH), warmup=6)
    # A graph of forward and backward; the wrapper cannot be in it.
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True, capturable=True)
    captured = torch.cuda.make_graphed_callables(net, (x,))

    def replay():
        optimizer.zero_grad()
        captured(x).mean().backward()
        optimizer.step()

    say_time("step_captured", replay, warmup=6)


def main():
    part = sys.argv[1] if len(sys.argv) == 2 else ""
    if part not in ("census", "times"):
        sys.exit("usage: cuda_census.py census|times")
    torch.cuda.set_device(0)
    dist.init_process_group("nccl")
    if part == "census":
        census_of_cut_models()  # as in census.cpp
        census_of_models()
    else:
        times()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
