// What a layout costs, beside closed forms.
#include "plan/cost.h"
#include "task.h"

#include "support/catch.h"

namespace {

using namespace ddp::plan;
using plan_test::mesh;
using plan_test::small_task;

constexpr double kLayer = 12.0 * 64 * 64, kTable = 100.0 * 64;

StepTime time_of(const Task& task, const Layout& layout) {
  return step_time(task.model, task.cluster, layout, task.batch);
}

Memory memory_of_task(const Task& task, const Layout& layout) {
  return memory_of(task.model, layout, task.batch);
}

}  // namespace

TEST_CASE("a step takes three forwards, with checkpointing a fourth of the layers", "[pure]") {
  auto model = small_task(1).model;
  const double layers = 8 * (2 * kLayer * 32 + 4 * 32 * 32 * 64), head = 2 * kTable * 32;
  CHECK(step_operations(model) == Approx(3 * (layers + head)));
  model.checkpoint = true;
  CHECK(step_operations(model) == Approx(4 * layers + 3 * head));
}

TEST_CASE("the state is 16 bytes a parameter, and each axis cuts it", "[pure]") {
  const auto task = small_task(8);
  const double all = 16 * (8 * kLayer + kTable);
  CHECK(memory_of_task(task, mesh(8, 1, 1)).state == Approx(all));
  CHECK(memory_of_task(task, mesh(4, 2, 1)).state == Approx(all / 2));
  // The table lies on the first and the last stage.
  CHECK(memory_of_task(task, mesh(4, 1, 2)).state == Approx(16 * (4 * kLayer + kTable)));

  auto sharded = mesh(8, 1, 1);
  sharded.fsdp = true;
  CHECK(memory_of_task(task, sharded).state == Approx(all / 8));
  CHECK(memory_of_task(task, sharded).whole == Approx(4 * kLayer * (4 + 1.0 / 8)));
  sharded = mesh(4, 1, 2);
  sharded.fsdp = true;  // whole from the first forward to the last backward, with gradients
  CHECK(memory_of_task(task, sharded).state == Approx(4 * (4 * kLayer + kTable)));
  CHECK(memory_of_task(task, sharded).whole == Approx(8 * (4 * kLayer + kTable)));
}

TEST_CASE("a stage keeps the activations of the micro-batches under way", "[pure]") {
  auto task = small_task(4);
  task.model.vocabulary = 0;
  const auto activations = [&](ddp::PipelineSchedule schedule, int64_t microbatches) {
    auto layout = mesh(1, 1, 4, microbatches);
    layout.schedule = schedule;
    return memory_of_task(task, layout).activations / layer_activations(task.model, 1);
  };
  // Of 2 layers and 16 / microbatches samples each.
  CHECK(activations(ddp::PipelineSchedule::GPipe, 8) == Approx(2 * 2 * 8));
  CHECK(activations(ddp::PipelineSchedule::OneFOneB, 8) == Approx(2 * 2 * 4));
  CHECK(activations(ddp::PipelineSchedule::OneFOneB, 2) == Approx(2 * 8 * 2));
  const double whole = activations(ddp::PipelineSchedule::OneFOneB, 16);
  CHECK(whole == Approx(2 * 1 * 4));
  task.model.checkpoint = true;  // inputs alone, and one layer that is computed again
  const auto kept = memory_of_task(task, mesh(1, 1, 4, 16)).activations;
  task.model.checkpoint = false;
  CHECK(kept == Approx(8 * 4 * 32 * 64 + layer_activations(task.model, 1)));
  CHECK(layer_activations(task.model, 2) < layer_activations(task.model, 1));
}

TEST_CASE("one rank takes its operations", "[pure]") {
  const auto task = small_task(1);
  const auto time = time_of(task, mesh(1, 1, 1));
  CHECK(time.total() == Approx(16 * step_operations(task.model) / 1e9));
  CHECK(time_of(task, mesh(1, 1, 1, 4)).total() == Approx(time.total()));
}

TEST_CASE("a layer takes a time beside its operations, with each micro-batch", "[pure]") {
  auto task = small_task(2);
  const auto without = time_of(task, mesh(1, 2, 1, 4)).compute;
  task.model.layer_us = 30;  // tp does not cut it
  CHECK(time_of(task, mesh(1, 2, 1, 4)).compute == Approx(without + 4 * 8 * 30e-6));
  task.model.checkpoint = true;
  const auto again = time_of(task, mesh(1, 2, 1, 4)).compute;
  task.model.layer_us = 0;
  CHECK(again == Approx(time_of(task, mesh(1, 2, 1, 4)).compute + 4 * 8 * 40e-6));
}

TEST_CASE("replicas add what computing does not hide of their reduction", "[pure]") {
  auto task = small_task(4);
  const double bytes = 4 * (8 * kLayer + kTable);
  const double reduction = 2 * 3 * (1e-6 + bytes / 4 / 1e9);
  CHECK(all_reduce_time(task.cluster, mesh(4, 1, 1), Axis::Dp, bytes) == Approx(reduction));
  CHECK(gather_time(task.cluster, mesh(4, 1, 1), Axis::Dp, bytes) == Approx(reduction / 2));
  task.cluster.overlap = 0;
  const auto time = time_of(task, mesh(4, 1, 1));
  CHECK(time.compute == Approx(4 * step_operations(task.model) / 1e9));
  CHECK(time.data == Approx(reduction));
  auto sharded = mesh(4, 1, 1);
  sharded.fsdp = true;
  CHECK(time_of(task, sharded).data == Approx(1.5 * reduction));

  // The last bucket has nothing beside it; all of these parameters fit in one.
  task.cluster.overlap = 1;
  CHECK(time_of(task, mesh(4, 1, 1)).data == Approx(reduction));
  task.model.parameters *= 100;
  const double large = all_reduce_time(task.cluster, mesh(4, 1, 1), Axis::Dp, 26214400);
  CHECK(time_of(task, mesh(4, 1, 1)).data == Approx(large).epsilon(0.01));
}

TEST_CASE("ranks that share layers wait for four sums a layer", "[pure]") {
  const auto task = small_task(2);
  const auto time = time_of(task, mesh(1, 2, 1));
  const double sum = 2 * (1e-6 + 16.0 * 4 * 32 * 64 / 2 / 1e9);
  CHECK(time.tensor == Approx((4 * 8 + 2) * sum));  // and those of the table and the head
  CHECK(time.compute == Approx(16 * step_operations(task.model) / 2e9));
}

TEST_CASE("a sum over tp takes a time beside its bytes, with each micro-batch", "[pure]") {
  auto task = small_task(4);
  const auto tensor = [&](const Layout& layout) { return time_of(task, layout).tensor; };
  const double cut = tensor(mesh(2, 2, 1, 4)), whole = tensor(mesh(4, 1, 1, 4));
  task.model.sum_us = 50;
  CHECK(tensor(mesh(2, 2, 1, 4)) == Approx(cut + 4 * (4 * 8 + 2) * 50e-6));
  CHECK(tensor(mesh(4, 1, 1, 4)) == whole);  // no sums
}

TEST_CASE("equal stages are idle for the pipeline's bubble", "[pure]") {
  auto task = small_task(4);
  task.model.vocabulary = 0;
  task.cluster.host = {0, 1e30};
  const auto idle = [&](int64_t microbatches) {
    const auto time = time_of(task, mesh(1, 1, 4, microbatches));
    return time.idle / time.total();
  };
  CHECK(idle(8) == Approx(3.0 / 11));
  CHECK(idle(1) == Approx(3.0 / 4));
  auto interleaved = mesh(1, 1, 4, 8);
  interleaved.schedule = ddp::PipelineSchedule::Interleaved;
  interleaved.chunks = 2;
  const auto time = time_of(task, interleaved);
  CHECK(time.idle / time.total() == Approx(3.0 / 19));
}

TEST_CASE("a stage with a head takes longer than the others", "[pure]") {
  auto task = small_task(2);
  task.cluster.host = {0, 1e30};
  task.model.vocabulary = 1000;
  task.model.parameters += 900 * 64;
  const double all = 16 * step_operations(task.model) / 1e9;
  // One micro-batch goes through all stages, one after the other.
  CHECK(time_of(task, mesh(1, 1, 2, 1)).total() == Approx(all));
  const auto time = time_of(task, mesh(1, 1, 2, 16));
  const double head = 16 * 3 * head_operations(task.model) / 1e9;
  CHECK(time.compute == Approx((all - head) / 2 + head));
}

TEST_CASE("ranks that share cores compute by turns, also while others wait", "[pure]") {
  auto task = small_task(4);
  task.model.vocabulary = 0;
  task.cluster.host = {0, 1e30};
  task.cluster.overlap = 0;
  const double work = 16 * step_operations(task.model) / 1e9;
  task.cluster.cores = 2;
  CHECK(time_of(task, mesh(4, 1, 1)).total() == Approx(work / 2));
  // Two stages of two replicas: a bubble of 1/9 of ranks is none of cores.
  CHECK(time_of(task, mesh(2, 1, 2, 8)).total() == Approx(work / 2));
  task.cluster.cores = 4;
  CHECK(time_of(task, mesh(2, 1, 2, 8)).total() == Approx(work / 4 * 9 / 8));
  // The cores also copy and add what the ranks of tp sum.
  task.cluster.cores = 2;
  task.model.sum_us = 50;
  const double sums = (4 * 8 / 2) * 8 * 50e-6;  // of a stage's layers and 8 micro-batches
  CHECK(time_of(task, mesh(1, 2, 2, 8)).total() == Approx(work / 2 + 2 * sums));
  // A GPU's link does not.
  task.cluster.overlap = 1;
  CHECK(time_of(task, mesh(1, 2, 2, 8)).total() == Approx(work / 2 + sums));
}

TEST_CASE("an axis that leaves the host goes over the network", "[pure]") {
  auto task = small_task(8);
  task.cluster.hosts = 2;
  const auto& cluster = task.cluster;
  CHECK_FALSE(crosses_hosts(cluster, mesh(2, 4, 1), Axis::Tp));
  CHECK(crosses_hosts(cluster, mesh(2, 4, 1), Axis::Dp));
  CHECK(crosses_hosts(cluster, mesh(1, 8, 1), Axis::Tp));
  CHECK_FALSE(crosses_hosts(cluster, mesh(2, 2, 2), Axis::Dp));
  CHECK(crosses_hosts(cluster, mesh(2, 2, 2), Axis::Pp));

  // Four groups of a rank on each host share the host's network.
  const double bytes = 1e6;
  CHECK(
      all_reduce_time(cluster, mesh(2, 4, 1), Axis::Dp, bytes) ==
      Approx(2 * (1e-4 + bytes / 2 / (1e8 / 4))));
  // One group of four on each: sums of a host go through it once.
  CHECK(
      all_reduce_time(cluster, mesh(8, 1, 1), Axis::Dp, bytes) ==
      Approx(2 * (3 * (1e-6 + bytes / 4 / 1e9) + 1e-4 + bytes / 2 / 1e8)));
  CHECK(message_time(cluster, mesh(2, 2, 2), bytes) == Approx(1e-4 + 4 * bytes / 1e8));
  task.cluster.hosts = 1;
  CHECK(message_time(cluster, mesh(2, 2, 2), bytes) == Approx(1e-6 + bytes / 1e9));
}
