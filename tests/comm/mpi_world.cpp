// A rank over MPI, started by mpirun: compares collectives with those of another backend, element
// by element. Values differ by rank and place, so that parts in a wrong order show.
//
// usage: mpi_world CASE, one of those in main(). Prints "ok CASE", or what is wrong.
#include <ddp/collectives.h>
#include <ddp/process_group.h>

#include <chrono>
#include <cstdio>
#include <functional>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

namespace {

using namespace std::chrono_literals;
using ddp::ProcessGroup;
using ddp::ProcessGroupOptions;
using Op = c10d::ReduceOp;

ProcessGroup group_over(const std::string& backend, std::chrono::milliseconds timeout = 180s) {
  return ddp::make_process_group(
      ProcessGroupOptions().backend(backend).init_method("mpi://").timeout(timeout));
}

/// Small numbers, so that products stay finite and 16 bits hold them.
at::Tensor values(int64_t numel, at::ScalarType dtype, int rank) {
  const auto place = at::arange(numel, at::kLong);
  const auto small = (place * 37 + rank * 11 + at::floor_divide(place, 1000)) % 13 - 5 + rank % 2;
  return small.to(dtype);
}

void require(bool holds, const std::string& what) {
  if (!holds) throw std::runtime_error(what);
}

void require_equal(const at::Tensor& got, const at::Tensor& expected, const std::string& what) {
  require(got.sizes() == expected.sizes() && at::equal(got, expected), what + " differs");
}

const std::vector<at::ScalarType> kDtypes{at::kFloat, at::kDouble, at::kHalf,   at::kBFloat16,
                                          at::kChar,  at::kByte,   at::kInt,    at::kLong,
                                          at::kBool,  at::kShort,  at::kUInt16, at::kComplexFloat};
const std::vector<int64_t> kSizes{0, 1, 1000, 100003};

/// Runs `call` over both groups on equal inputs, or catches that both refuse it.
void compare(
    const std::string& what, const ProcessGroup& mpi, const ProcessGroup& other,
    const std::function<at::Tensor(const ProcessGroup&)>& call) {
  const auto run = [&](const ProcessGroup& group, std::string& error) {
    try {
      return call(group);
    } catch (const c10::ValueError& refused) {
      error = refused.what_without_backtrace();
      return at::Tensor();
    }
  };
  std::string error_of_mpi;
  std::string error_of_other;
  const auto got = run(mpi, error_of_mpi);
  const auto expected = run(other, error_of_other);
  require(
      error_of_mpi.empty() == error_of_other.empty(),
      what + ": only one backend refuses it: " + error_of_mpi + error_of_other);
  if (error_of_mpi.empty()) require_equal(got, expected, what);
}

void compare_reductions(const ProcessGroup& mpi, const ProcessGroup& other) {
  const int rank = mpi->getRank();
  for (const auto dtype : kDtypes) {
    for (const auto numel : kSizes) {
      for (const auto op : {Op::SUM, Op::AVG, Op::PRODUCT, Op::MIN, Op::MAX, Op::BAND, Op::BXOR}) {
        const auto what = std::string("all_reduce ") + at::toString(dtype) + " x " +
                          std::to_string(numel) + ", operation " + std::to_string(op);
        compare(what, mpi, other, [&](const ProcessGroup& group) {
          auto tensor = values(numel, dtype, rank);
          ddp::all_reduce(tensor, op, group);
          return tensor;
        });
      }
      compare("reduce", mpi, other, [&](const ProcessGroup& group) {
        auto tensor = values(numel, dtype, rank);
        ddp::reduce(tensor, group->getSize() - 1, Op::SUM, group);
        return rank == group->getSize() - 1 ? tensor : at::zeros({1});
      });
    }
  }
}

void compare_moves(const ProcessGroup& mpi, const ProcessGroup& other) {
  const int rank = mpi->getRank();
  const int size = mpi->getSize();
  for (const auto dtype : kDtypes) {
    for (const auto numel : kSizes) {
      const auto own = values(numel, dtype, rank);
      const auto whole = values(numel * size, dtype, rank);
      const auto zeros = [&](int64_t count) { return at::zeros({count}, own.options()); };
      compare("broadcast", mpi, other, [&](const ProcessGroup& group) {
        auto tensor = own.clone();
        ddp::broadcast(tensor, size - 1, group);
        return tensor;
      });
      compare("all_gather_into_tensor", mpi, other, [&](const ProcessGroup& group) {
        auto to = zeros(numel * size);
        ddp::all_gather_into_tensor(to, own, group);
        return to;
      });
      compare("reduce_scatter_tensor", mpi, other, [&](const ProcessGroup& group) {
        auto to = zeros(numel);
        ddp::reduce_scatter_tensor(to, whole, Op::SUM, group);
        return to;
      });
      compare("all_to_all_single", mpi, other, [&](const ProcessGroup& group) {
        auto to = zeros(numel * size);
        ddp::all_to_all_single(to, whole, {}, {}, group);
        return to;
      });
      compare("all_gather and scatter of lists", mpi, other, [&](const ProcessGroup& group) {
        std::vector<at::Tensor> lists;
        for (int r = 0; r < size; ++r) lists.push_back(zeros(numel));
        ddp::all_gather(lists, own, group);
        auto part = zeros(numel);
        ddp::scatter(part, rank == 0 ? lists : std::vector<at::Tensor>{}, 0, group);
        lists.push_back(part);
        return at::cat(lists);
      });
    }
  }
  compare("a tensor that is not contiguous", mpi, other, [&](const ProcessGroup& group) {
    auto tensor = values(12000, at::kFloat, rank).view({100, 120}).t();
    ddp::all_reduce(tensor, Op::SUM, group);
    ddp::broadcast(tensor, 0, group);
    return tensor.contiguous();
  });
}

/// Each rank sends to the next one: short and long, in both orders of tags.
void compare_messages(const ProcessGroup& mpi) {
  const int rank = mpi->getRank();
  const int size = mpi->getSize();
  const int next = (rank + 1) % size;
  const int previous = (rank + size - 1) % size;
  for (const int64_t numel : {0, 5, 4096, 100003}) {
    const auto sent = values(numel, at::kFloat, rank);
    const auto again = sent + 1;
    const auto first = ddp::send_async(sent, next, 3, mpi);
    const auto second = ddp::send_async(again, next, 4, mpi);
    const auto third = ddp::send_async(sent + 2, next, 4, mpi);
    auto got = at::empty_like(sent);
    auto late = at::empty_like(sent);
    auto last = at::empty_like(sent);
    ddp::recv(late, previous, 4, mpi);
    ddp::recv(got, previous, 3, mpi);
    ddp::recv(last, previous, 4, mpi);
    for (const auto& work : {first, second, third}) work->wait();
    const auto expected = values(numel, at::kFloat, previous);
    require_equal(got, expected, "a message");
    require_equal(late, expected + 1, "a message with another tag");
    require_equal(last, expected + 2, "the second message with a tag");
  }
}

/// Many collectives under way, in groups that start them in other orders.
void many_at_once(const ProcessGroup& mpi) {
  const int rank = mpi->getRank();
  const int size = mpi->getSize();
  std::vector<int> all;
  for (int r = 0; r < size; ++r) all.push_back(r);
  const auto second = ddp::new_group(all, mpi);
  std::vector<at::Tensor> tensors;
  std::vector<c10::intrusive_ptr<c10d::Work>> works(600);
  for (int64_t i = 0; i < 600; ++i) tensors.push_back(at::full({1 + i % 7 * 5000}, rank + i));
  const auto start = [&](size_t i) {
    works[i] = ddp::all_reduce_async(tensors[i], Op::SUM, i % 2 == 0 ? mpi : second);
    if (i % 50 == static_cast<size_t>(rank)) std::this_thread::sleep_for(2ms);
  };
  // One group's first, then the other's: on odd ranks the other way round.
  for (const size_t half : {0, 1}) {
    for (size_t i = (half + static_cast<size_t>(rank)) % 2; i < 600; i += 2) start(i);
  }
  for (size_t i = 0; i < 600; ++i) {
    works[i]->wait();
    const auto sum = size * (size - 1) / 2 + size * static_cast<int64_t>(i);
    require_equal(tensors[i], at::full_like(tensors[i], sum), "all-reduce " + std::to_string(i));
  }
}

void compare_all() {
  const auto mpi = group_over("mpi");
  // shm reduces in the same order; the ranks are on one host.
  const auto other = group_over("shm");
  require(mpi->getBackend(c10::kCPU)->getBackendName() == "mpi", "the backend is another");
  compare_reductions(mpi, other);
  compare_moves(mpi, other);
  compare_messages(mpi);
  many_at_once(mpi);
  const int half = mpi->getSize() / 2;
  const auto part = ddp::split_group(mpi->getRank() / std::max(half, 1), mpi->getRank(), mpi);
  auto tensor = at::full({20000}, 1.0 * mpi->getRank());
  ddp::all_reduce(tensor, Op::SUM, part);
  ddp::barrier(mpi);
}

/// Several groups, one after another, in one process.
void again() {
  for (int i = 0; i < 3; ++i) {
    ddp::init_process_group(ProcessGroupOptions().backend("mpi").timeout(180s));
    auto tensor = at::ones({3});
    ddp::all_reduce(tensor);
    require_equal(tensor, at::full({3}, 1.0 * ddp::get_world_size()), "the sum");
    ddp::destroy_process_group();
  }
}

/// Ranks call different things: every rank names them, and none hangs.
void different() {
  const auto mpi = group_over("mpi", 60s);
  auto tensor = at::ones({mpi->getRank() == 0 ? 10 : 20000});
  try {
    ddp::all_reduce(tensor, Op::SUM, mpi);
  } catch (const c10::Error& error) {
    std::printf("rank %d: %s\n", mpi->getRank(), error.what_without_backtrace());
    return;
  }
  require(false, "the sizes differ, and no rank says so");
}

/// The last rank never calls the collective.
void late() {
  const auto mpi = group_over("mpi", 3s);
  if (mpi->getRank() == mpi->getSize() - 1) {
    std::this_thread::sleep_for(12s);
    return;
  }
  auto tensor = at::ones({4});
  const auto begin = std::chrono::steady_clock::now();
  try {
    ddp::all_reduce(tensor, Op::SUM, mpi);
  } catch (const c10::Error& error) {
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    std::printf(
        "rank %d after %.1f s: %s\n", mpi->getRank(), took.count(), error.what_without_backtrace());
    return;
  }
  require(false, "a rank is late, and no error says so");
}

/// Messages beyond what an int counts. By hand: takes 9 GB for two ranks.
void huge() {
  const auto mpi = group_over("mpi", 600s);
  const int64_t bytes = (int64_t{1} << 31) + 5;
  auto tensor = at::arange(bytes, at::TensorOptions().dtype(at::kByte));
  const auto expected = tensor.clone();
  if (mpi->getRank() != 0) tensor.zero_();
  ddp::broadcast(tensor, 0, mpi);
  require_equal(tensor, expected, "a broadcast of 2 GiB");
  if (mpi->getRank() != 0) tensor.zero_();
  if (mpi->getRank() == 0) ddp::send(tensor, 1, 0, mpi);
  if (mpi->getRank() == 1) ddp::recv(tensor, 0, 0, mpi);
  require_equal(tensor, expected, "a message of 2 GiB");
}

}  // namespace

int main(int argc, char** argv) {
  at::set_num_threads(1);
  const std::map<std::string, std::function<void()>> cases{
      {"all", compare_all},
      {"again", again},
      {"different", different},
      {"late", late},
      {"huge", huge}};
  const std::string name = argc > 1 ? argv[1] : "";
  const auto found = cases.find(name);
  if (found == cases.end()) {
    std::fprintf(stderr, "usage: mpi_world all|again|different|late|huge\n");
    return 2;
  }
  try {
    found->second();
  } catch (const std::exception& error) {
    std::printf("FAILED: %s\n", error.what());
    return 1;
  }
  std::printf("ok %s\n", name.c_str());
  return 0;
}
