// One rank of a world of at least three, except as noted below: tests in real processes what ranks
// on threads cannot, because these do not have a default group each. Exits with 0 on success.
//
// world               as above
// world fail-once     rank 1 exits with 3 after the rendezvous, unless torchrun has restarted it
// world backend NAME  any number of ranks: each prints the backend of its CPU tensors
// world fork [NAME]   several ranks: a process that a rank forks may exit, or drop all objects;
// what takes the rank's place is an error there
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <c10/util/Exception.h>

#include <ddp/collectives.h>

#include "support/error_of.h"
#include "support/foreign_locale.h"

namespace comm_world {

using c10d::ReduceOp;

namespace {

double sum_of_ranks(const ddp::GroupArg& group) {
  auto tensor = at::full({1}, static_cast<double>(ddp::get_rank()));
  ddp::all_reduce(tensor, ReduceOp::SUM, group);
  return tensor.item<double>();
}

void expect_error(const char* words, const std::function<void()>& body) {
  const auto text = ddp::testing::error_of<c10::Error>(body);
  TORCH_CHECK(text.find(words) != std::string::npos, "expected \"", words, "\" in: ", text);
}

void check_world() {
  const int rank = ddp::get_rank();
  const int size = ddp::get_world_size();
  TORCH_CHECK(ddp::is_launched() && ddp::is_initialized() && size >= 3);
  TORCH_CHECK(ddp::get_local_rank() == rank, "one host: the local rank is the rank");
  TORCH_CHECK(sum_of_ranks({}) == size * (size - 1) / 2.0);
  ddp::barrier();

  // A group without rank 0, whose process has the store.
  const auto others = ddp::new_group({1, 2});
  TORCH_CHECK(static_cast<bool>(others) == (rank == 1 || rank == 2));
  if (others) {
    TORCH_CHECK(ddp::get_rank(others) == rank - 1 && ddp::get_world_size(others) == 2);
    TORCH_CHECK(sum_of_ranks(others) == 3);
  } else {
    expect_error("got an empty one", [&] { sum_of_ranks(others); });
  }
  expect_error("there is one", [] { ddp::init_process_group(); });

  // Called last, before rank 0 exits with the store.
  ddp::monitored_barrier(std::chrono::seconds(30));
  ddp::destroy_process_group();
  expect_error("expected a default group", [] { ddp::get_rank(); });
}

// The actions of a process that a rank has forked.
enum class Child { kExits, kDestroysGroup, kCalls, kDropsAll };

void expect_errors_in_child(
    const ddp::ProcessGroup& group, c10d::Backend& backend, c10d::Work& pending) {
  const auto expect = [](const char* call, const std::function<void()>& body) {
    try {
      expect_error("it forked", body);
    } catch (const std::exception& error) {
      TORCH_CHECK(false, call, ": ", error.what());
    }
  };
  const int other = (ddp::get_rank() + 1) % ddp::get_world_size();
  auto tensor = at::full({5000}, 1.0);
  std::vector<at::Tensor> tensors{tensor};
  expect("all_reduce", [&] { ddp::all_reduce(tensor, group); });
  expect("barrier", [] { ddp::barrier(); });
  expect("send", [&] { ddp::send(tensor, other); });
  expect("recv", [&] { ddp::recv(tensor, other); });
  expect("new_group", [] { ddp::new_group({0}); });
  expect("monitored_barrier", [] { ddp::monitored_barrier(std::chrono::seconds(30)); });
  expect("the backend's allreduce", [&] { backend.allreduce(tensors)->wait(); });
  std::vector<at::Tensor> sparse{tensor.to_sparse()};
  expect("a call that Gloo carries", [&] { backend.allreduce(sparse)->wait(); });
  expect("the backend's send", [&] { backend.send(tensors, other, 0)->wait(); });
  expect("wait", [&] { pending.wait(); });
  ddp::abort_process_group(group);
  backend.abort();
}

void check_fork() {
  const int size = ddp::get_world_size();
  const double sum = size * (size - 1) / 2.0;
  TORCH_CHECK(sum_of_ranks({}) == sum);
  std::vector<int> all(static_cast<size_t>(size));
  std::iota(all.begin(), all.end(), 0);
  auto second = ddp::new_group(all);
  // Memory of the backend if it has its own, as for a gradient.
  auto backend = second->getBackend(c10::kCPU);
  const auto options = at::TensorOptions().dtype(at::kFloat);
  auto gradient = backend->supportsTensorAlloc(0) ? backend->allocateTensor(5000, options)
                                                  : at::empty({5000}, options);
  gradient.fill_(7);
  const int rank = ddp::get_rank();
  auto received = at::full({1}, -1.0);
  const auto pending = ddp::recv_async(received, (rank + 1) % size);
  for (const auto what : {Child::kExits, Child::kDestroysGroup, Child::kCalls, Child::kDropsAll}) {
    const auto child = fork();
    if (child == 0) {
      alarm(20);
      if (what == Child::kCalls) expect_errors_in_child(second, *backend, *pending);
      if (what == Child::kDestroysGroup) ddp::destroy_process_group();
      if (what == Child::kDropsAll) {
        backend->shutdown();
        gradient.reset();
        backend.reset();
        second.reset();
        ddp::destroy_process_group();
      }
      std::exit(EXIT_SUCCESS);
    }
    int status = -1;
    waitpid(child, &status, 0);
    TORCH_CHECK(status == 0, "expected what was forked to exit with 0, got status ", status);
    TORCH_CHECK(gradient.eq(7).all().item<bool>(), "expected what lies in it to stay");
  }
  ddp::barrier();
  // More than the collectives that shared memory remembers.
  for (int i = 0; i < 300; ++i) {
    TORCH_CHECK(sum_of_ranks({}) == sum);
    TORCH_CHECK(sum_of_ranks(second) == sum);
  }
  ddp::send(at::full({1}, static_cast<double>(rank)), (rank + size - 1) % size);
  pending->wait();
  TORCH_CHECK(received.item<double>() == (rank + 1) % size);
  // The store still works, too.
  TORCH_CHECK(sum_of_ranks(ddp::new_group(all)) == sum);
}

}  // namespace

int main(int argc, char** argv) try {
  const std::string what = argc > 1 ? argv[1] : "";
  if (what == "backend") {
    const auto group = ddp::init_process_group(ddp::ProcessGroupOptions().backend(argv[2]));
    std::printf("uses %s\n", group->getBackend(c10::kCPU)->getBackendName().c_str());
    return EXIT_SUCCESS;
  }
  if (what == "fork") {
    ddp::init_process_group(ddp::ProcessGroupOptions()
                                .backend(argc > 2 ? argv[2] : "")
                                .timeout(std::chrono::seconds(30)));
    check_fork();
    return EXIT_SUCCESS;
  }
  ddp::init_process_group(
      ddp::ProcessGroupOptions().backend("gloo").timeout(std::chrono::seconds(30)));
  const char* restarts = std::getenv("TORCHELASTIC_RESTART_COUNT");
  const bool first = restarts == nullptr || std::strcmp(restarts, "0") == 0;
  if (what == "fail-once" && first && ddp::get_rank() == 1) {
    std::printf("rank 1 fails once\n");
    std::fflush(
        stdout);  // the others may fail before this process ends, and torchrun then kills it
    return 3;
  }
  check_world();
  return EXIT_SUCCESS;
} catch (const std::exception& error) {
  std::fprintf(stderr, "world: %s\n", error.what());
  return EXIT_FAILURE;
}

}  // namespace comm_world
