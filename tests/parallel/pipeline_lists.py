# Compares the lists of all small pipelines with PyTorch's: what its schedules of one stage a rank do
# with a stage that writes down what it is to compute, and the lists that the interleaved one keeps.
# pipeline_lists.py PROGRAM
import itertools
import subprocess
import sys

from torch.distributed.pipelining import schedules


class Stage:
    """Takes the place of PyTorch's PipelineStage: computes and sends nothing."""

    has_backward = True

    def __init__(self, index, ranks, stages):
        self.stage_index, self.num_stages = index, stages
        self.group_rank, self.group_size = index % ranks, ranks
        self.is_first, self.is_last = index == 0, index == stages - 1
        self.done = []

    def forward_one_chunk(self, microbatch, *_, **__):
        self.done.append(f"{self.stage_index}F{microbatch}")

    def backward_one_chunk(self, microbatch, **_):
        self.done.append(f"{self.stage_index}B{microbatch}")

    def no_messages(self, *_):
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = no_messages
    _get_init_p2p_neighbors_ops = no_messages

    def nothing(self, *_, **__):
        pass

    _prepare_forward_infra = _prepare_backward_infra = perform_reduce_grad = nothing


def lists_of_one_stage(schedule, ranks, microbatches):
    stages = [Stage(rank, ranks, ranks) for rank in range(ranks)]
    for stage in stages:
        schedule(stage, microbatches)._step_microbatches()
    return [stage.done for stage in stages]


def lists_of_several(ranks, chunks, microbatches):
    stages = [Stage(chunk * ranks, ranks, chunks * ranks) for chunk in range(chunks)]
    order = schedules.ScheduleInterleaved1F1B(stages, microbatches).pipeline_order
    return [[str(action) for action in order[rank] if action] for rank in range(ranks)]


def lists_of(name, ranks, chunks, microbatches):
    if name == "Interleaved1F1B":
        return lists_of_several(ranks, chunks, microbatches)
    return lists_of_one_stage(getattr(schedules, f"Schedule{name}"), ranks, microbatches)


output = subprocess.run([sys.argv[1]], capture_output=True, text=True, check=True).stdout
ours = {}
for line in output.splitlines():
    key, actions = line.split(":")
    ours[key] = actions.split()

compared = refused = 0
for name, ranks, chunks, microbatches in itertools.product(
    ("GPipe", "1F1B", "Interleaved1F1B"), range(1, 7), range(1, 4), range(1, 13)
):
    if chunks > 1 and name != "Interleaved1F1B":
        continue
    try:
        pythons = lists_of(name, ranks, chunks, microbatches)
    except ValueError:  # fewer micro-batches than stages, or none that make equal rounds
        refused += 1
        continue
    for rank, expected in enumerate(pythons):
        key = f"{name} {ranks} {chunks} {microbatches} {rank}"
        if ours[key] != expected:
            sys.exit(f"FAILED: {key}: expected {expected}, got {ours[key]}")
        compared += 1
assert compared > 1000, f"only {compared} lists were compared, {refused} pipelines refused"
print(f"{compared} lists equal PyTorch's, which refuses {refused} pipelines")
